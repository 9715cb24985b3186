"""The crew of Keepers: renewed whatever happens, replaced where one died. Ray is replaced."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from orchestrator import keepers
from orchestrator.config import RunConfig, RunSettings
from orchestrator.keepers import KeeperCrew
from orchestrator.node_watcher import ClusterView, NodeView
from storage.errors import StorageError
from workers.config import DataConfig, ModelConfig

NODE = "a" * 56
WAIT_S = 20.0
pytestmark = pytest.mark.timeout(60)


class OpenCall:
    """Is over when its Keeper is dead."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper

    def outcome(self) -> Any:
        return self.keeper.outcome()


class Keeper:
    """Answers every call but one with itself as the reference."""

    def __init__(self) -> None:
        self.is_dead = False
        self.outlast = SimpleNamespace(remote=lambda: OpenCall(self))
        self.renewed = threading.Semaphore(0)
        self.renew = SimpleNamespace(remote=self._renew)
        self.newest_attempt = -1
        self.close = SimpleNamespace(remote=lambda: self)

    def _renew(self, _: float, newest_attempt: int) -> Keeper:
        self.newest_attempt = newest_attempt
        return self

    def outcome(self) -> Any:
        if self.is_dead:
            raise ray.exceptions.ActorDiedError
        self.renewed.release()
        return SimpleNamespace(memory_error="")


class Bench:
    """``start``, ``look``: what makes a Keeper, and what the head says."""

    def __init__(self, patch: pytest.MonkeyPatch, *, renew_every_s: float = 0.01) -> None:
        self.start: Callable[[], Keeper] = Keeper
        self.look: Callable[[], ClusterView] = living_node
        fake_ray = SimpleNamespace(
            exceptions=ray.exceptions,
            wait=ready_ones,
            get=lambda keeper: keeper.outcome(),
            kill=lambda *_, **__: None,
        )
        patch.setattr(keepers, "ray", fake_ray)
        patch.setattr(keepers, "ensure_keeper", lambda **_: self.start())
        patch.setattr(keepers, "look", lambda: self.look())
        patch.setattr(keepers, "_greet", lambda *_: None)
        patch.setattr(keepers, "_RENEW_EVERY_S", renew_every_s)
        patch.setattr(keepers, "_START_PAUSES_S", (0.0, 0.01, 0.01))
        config = RunConfig(
            run=RunSettings(name="r", url="memory://r", steps=100),
            model=ModelConfig(),
            data=DataConfig(url="memory://d", sequence_length=8, global_batch=8),
        )
        self.crew = KeeperCrew("r", config)


def ready_ones(refs: list[Any], timeout: float, **_: Any) -> tuple[list[Any], list[Any]]:
    ready = [ref for ref in refs if not isinstance(ref, OpenCall) or ref.keeper.is_dead]
    if not ready:
        threading.Event().wait(min(timeout, 0.001))
    return ready, [ref for ref in refs if ref not in ready]


def living_node() -> ClusterView:
    return ClusterView(nodes={NODE: NodeView(node_id=NODE, is_alive=True, resources={})})


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(monkeypatch)
    yield bench
    bench.crew.close()


def test_a_keeper_that_died_gets_a_successor_though_head_and_first_tries_fail(bench: Bench) -> None:
    first, second = bench.crew.start(NODE), Keeper()
    answers: Iterator[Any] = iter([ConnectionError("the head is away"), None, None])

    def look() -> ClusterView:
        answer = next(answers)
        if answer is not None:
            raise answer
        return living_node()

    starts: Iterator[Any] = iter([StorageError("its Keeper does not greet"), second])

    def start() -> Keeper:
        made: Keeper | StorageError = next(starts)
        if isinstance(made, StorageError):
            raise made
        return made

    bench.look, bench.start = look, start
    first.is_dead = True
    assert second.renewed.acquire(timeout=WAIT_S)
    assert bench.crew.handles() == {NODE: second}


def test_the_others_are_renewed_though_a_keeper_died_while_the_head_was_away(bench: Bench) -> None:
    def away() -> ClusterView:
        raise ConnectionError("the head is away")

    bench.look = away
    dead, other = bench.crew.start("b" * 56), bench.crew.start(NODE)
    dead.is_dead = True
    for _ in range(20):
        assert other.renewed.acquire(timeout=WAIT_S)


def test_a_keeper_of_a_node_that_is_gone_gets_no_successor(bench: Bench) -> None:
    looked = threading.Event()

    def look() -> ClusterView:
        looked.set()
        return ClusterView(nodes={})

    first = bench.crew.start(NODE)
    bench.look, bench.start = look, lambda: pytest.fail("nothing is started")
    first.is_dead = True
    assert looked.wait(WAIT_S)
    assert bench.crew.handles() == {}


def test_every_keeper_hears_of_the_newest_attempt_one_that_came_later_too(bench: Bench) -> None:
    def hear(keeper: Keeper) -> int:
        for _ in range(3):  # the second is asked for after the first was answered
            assert keeper.renewed.acquire(timeout=WAIT_S)
        return keeper.newest_attempt

    first = bench.crew.start(NODE)
    assert hear(first) == 0
    bench.crew.fence(3)
    bench.crew.fence(2)
    later = bench.crew.start("b" * 56)
    assert (hear(first), hear(later)) == (3, 3)


def test_a_death_is_noticed_at_once_and_not_at_the_next_renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, renew_every_s=1000.0)
    first, second, started = bench.crew.start(NODE), Keeper(), threading.Event()

    def start() -> Keeper:
        started.set()
        return second

    bench.start = start
    first.is_dead = True
    assert started.wait(WAIT_S)
    bench.crew.close()
