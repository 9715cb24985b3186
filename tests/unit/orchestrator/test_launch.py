"""How a driver takes everything down: what its Keepers hold is left to the next one unless it came to a verdict."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from orchestrator import launch
from orchestrator.controller import RunEnd
from orchestrator.exit_codes import ExitCode


class Stub:
    """Stands for whatever is made on the way up; remembers what was called."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self.calls.append(name)


def control(patch: pytest.MonkeyPatch, outcome: RunEnd | Exception) -> list[str]:
    """Run a controller that ends so; what the crew of Keepers was told, in order."""
    crew = Stub()

    class Controlling(Stub):
        def run(self) -> RunEnd:
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

    for name in ("MeetingPoint", "WorkerGroup", "NodeWatcher", "RequestDesk", "Recorder", "Lifelines", "make_verifier"):
        patch.setattr(launch, name, Stub)
    patch.setattr(launch._Driver, "_settings", lambda _: Stub())
    patch.setattr(launch, "Controller", Controlling)
    patch.setattr(launch, "KeeperCrew", lambda *_: crew)
    patch.setattr(launch, "request_resources", lambda **_: None)
    util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    patch.setattr(launch, "ray", SimpleNamespace(exceptions=ray.exceptions, util=util))
    config = SimpleNamespace(
        world=SimpleNamespace(resources_per_worker={"CPU": 1.0}), run=SimpleNamespace(url="/run"), log_level="INFO"
    )
    nothing: Any = Stub()
    driver = launch._Driver(config, nothing, "r", "nonce", nothing, nothing, None, {}, nothing)  # type: ignore[arg-type]
    event = threading.Event()
    expected = pytest.raises(type(outcome)) if isinstance(outcome, Exception) else contextlib.nullcontext()
    with expected:
        driver._control(nothing, nothing, nothing, nothing, event, event, 1, None)
    return crew.calls


@pytest.mark.parametrize("error", [KeyError("w001"), ray.exceptions.ActorDiedError()])
def test_a_driver_that_breaks_leaves_what_memory_holds_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    assert control(monkeypatch, error) == ["leave_behind", "close"]


def test_a_driver_that_ends_the_run_ends_its_keepers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert control(monkeypatch, RunEnd(exit_code=ExitCode.STOPPED, reason="stopped on request")) == ["close"]


def test_a_driver_that_ends_with_more_in_memory_than_in_the_store_leaves_it_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end = RunEnd(exit_code=ExitCode.BELOW_MINIMUM, reason="every node goes away", keeps_memory=True)
    assert control(monkeypatch, end) == ["leave_behind", "close"]
