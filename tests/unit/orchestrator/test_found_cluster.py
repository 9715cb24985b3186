"""Which Ray cluster is joined where none is named. Real sockets; what Ray would find is given."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import ray._private.utils
from ray._private import services

from orchestrator import found_cluster, launch
from orchestrator.cli_start import exit_code_of
from orchestrator.errors import ConfigError
from orchestrator.exit_codes import ExitCode
from orchestrator.found_cluster import finds_cluster
from orchestrator.options import DriverOptions

OUTER = "127.0.0.2"  # an address of this machine at which the head below does not listen


@pytest.fixture
def head() -> Iterator[str]:
    """The address of somebody who listens on the loopback alone."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def finding(
    patch: pytest.MonkeyPatch, *, remembered: str | None = None, running: tuple[str, ...] = (), outer: str = OUTER
) -> None:
    """Let Ray remember and find these, and take ``outer`` for the machine's address."""
    for module in (found_cluster, ray._private.utils):
        patch.setattr(module, "read_ray_address", lambda *_: remembered)
    patch.setattr(services, "find_gcs_addresses", lambda: frozenset(running))
    patch.setattr(services, "get_node_ip_address", lambda *_: outer)
    patch.setattr(found_cluster, "_PATIENCE_S", 0.0)
    patch.delenv("RAY_ADDRESS", raising=False)
    patch.delenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", raising=False)


def test_nothing_is_found_where_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    finding(monkeypatch)
    assert not finds_cluster()


def test_a_cluster_whose_head_answers_is_found(monkeypatch: pytest.MonkeyPatch, head: str) -> None:
    finding(monkeypatch, remembered=head, running=(head,), outer="127.0.0.1")
    assert finds_cluster()


def test_a_remembered_cluster_that_is_gone_is_none(monkeypatch: pytest.MonkeyPatch, head: str) -> None:
    port = head.rpartition(":")[2]
    finding(monkeypatch, remembered=f"{OUTER}:{port}")
    assert not finds_cluster()


@pytest.mark.parametrize("is_remembered", [True, False])
def test_a_cluster_whose_head_ray_could_not_reach_is_refused_with_its_address_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, head: str, is_remembered: bool
) -> None:
    finding(monkeypatch, remembered=head if is_remembered else None, running=(head,))
    with pytest.raises(ConfigError) as caught:
        finds_cluster()
    text = str(caught.value)
    assert text.startswith(f"{OUTER}:{head.rpartition(':')[2]}: ")
    for word in ("refused", "--local-nodes", "--ray-address", "ray start"):
        assert word in text


def test_ray_is_not_asked_to_join_what_does_not_answer(monkeypatch: pytest.MonkeyPatch, head: str) -> None:
    finding(monkeypatch, remembered=head, running=(head,))
    asked: list[object] = []
    monkeypatch.setattr("ray.init", lambda **options: asked.append(options))

    def drive() -> int:
        with launch._cluster(DriverOptions()):
            return 0

    assert exit_code_of(drive) == ExitCode.CONFIG_ERROR
    assert asked == []
