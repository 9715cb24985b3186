"""The checks before the first worker, on a store in memory."""

# ruff: noqa: ARG002 - doubles take what the interface gives

from __future__ import annotations

import logging

import pytest

from orchestrator.config import RunConfig
from orchestrator.errors import ConfigError, StartOutage
from orchestrator.preflight import check_before_start
from storage.errors import StoreRefused, StoreUnavailable
from storage.memory_store import MemoryStore
from storage.object_store import ObjectEntry


def config_at(url: str) -> RunConfig:
    tree = {
        "run": {"name": "mine", "url": url, "steps": 10},
        "model": {"config": {"model_type": "llama"}},
        "data": {"url": "/data", "sequence_length": 8, "global_batch": 4},
    }
    return RunConfig.model_validate(tree)


def test_the_probe_leaves_nothing_behind() -> None:
    store = MemoryStore()
    assert check_before_start(store, config_at("memory://a")).honours_create
    assert list(store.list("")) == []


def test_a_store_that_refuses_is_a_config_error_with_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()

    def put(key: str, *_: object, **__: object) -> None:
        raise StoreRefused("put", key, "access denied")

    monkeypatch.setattr(store, "put", put)
    with pytest.raises(ConfigError, match=r"access denied.*check run\.url") as raised:
        check_before_start(store, config_at("s3://b/a"))
    assert not isinstance(raised.value, StartOutage)


def test_a_store_that_is_away_is_not_a_fault_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()

    def put(key: str, *_: object, **__: object) -> None:
        raise StoreUnavailable("put", key, "503 Slow Down")

    monkeypatch.setattr(store, "put", put)
    with pytest.raises(StartOutage, match=r"503 Slow Down.*try again when it is back"):
        check_before_start(store, config_at("s3://b/a"))


@pytest.mark.parametrize(
    ("url", "is_warned"),
    [
        ("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1/outputs/a", True),
        ("/shared/outputs/a", False),
    ],
)
def test_a_place_inside_a_jobs_temporary_directory_is_warned_of(
    url: str, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_before_start(MemoryStore(), config_at(url))
    assert ("temporary copy of the job's working directory" in caplog.text) is is_warned


class _Late(MemoryStore):
    """Listings show nothing that was just put."""

    def list(self, prefix: str, *, deadline_s: float = 60.0) -> list[ObjectEntry]:
        return []


class _Ignoring(MemoryStore):
    """Accepts a create-only write of a name that is taken."""

    def create(self, key: str, data: bytes, *, deadline_s: float = 60.0) -> None:
        self.put(key, data)


def test_what_the_store_was_seen_to_do_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        facts = check_before_start(_Ignoring(), config_at("memory://a"))
    assert not facts.honours_create
    assert caplog.text.count("create-only put: ignored") == 1
    assert "commits rest on one writer" in caplog.text


def test_a_store_with_late_listings_is_warned_of_and_used(caplog: pytest.LogCaptureFixture) -> None:
    assert check_before_start(_Late(), config_at("memory://a")).fresh_after_put == "no"
    assert "shows changes late" in caplog.text
