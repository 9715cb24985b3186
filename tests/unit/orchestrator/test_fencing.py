"""Who survives a fault, by what lifelines and answers show. Ray's calls and the worker group are replaced."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from orchestrator import fencing, vital_signs
from orchestrator.bell import Bell
from orchestrator.config import FailureConfig
from orchestrator.fencing import Reckoning, fence_late, reckon
from orchestrator.vital_signs import VitalSigns
from storage.keys import Attempt
from workers.contract import AbandonReport, Member, World
from workers.lifeline import Role

ATTEMPT = Attempt(number=1, nonce="abcd1234")
MEMBERS = tuple(Member(rank=rank, worker_id=f"w{rank}", node_id=f"n{rank}") for rank in range(3))
WORLD = World(attempt=ATTEMPT, members=MEMBERS)
FOR_EVER_S = 1e6
pytestmark = pytest.mark.timeout(30)  # what waits for nothing waits for ever


class Call(Future[Any]):
    """An answer that comes, fails or never comes, in place of an object reference."""

    def future(self) -> Future[Any]:
        return self


def answered(value: Any) -> Call:
    call = Call()
    call.set_result(value)
    return call


class FakeRay:
    """`ray.wait` and `ray.get` over Calls; `exceptions` are Ray's own."""

    exceptions = ray.exceptions

    @staticmethod
    def wait(refs: list[Call], *, num_returns: int = 1, timeout: float) -> tuple[list[Call], list[Call]]:
        del num_returns
        done, late = wait(refs, timeout=timeout)
        return list(done), list(late)

    @staticmethod
    def get(ref: Call) -> Any:
        return ref.result(timeout=0)


@dataclass
class Lines:
    """Cut lifelines."""

    bell: Bell = field(default_factory=Bell)
    workers: set[str] = field(default_factory=set)
    agents: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)  # nodes whose agent's line stands, and workers

    def is_held(self, role: Role, name: str) -> bool:
        assert name.startswith("n" if role is Role.AGENT else "w")
        return name in self.held

    def is_cut(self, worker_id: str) -> bool:
        return worker_id in self.workers

    def cut_at_s(self, worker_id: str) -> float | None:
        return 1.0 if worker_id in self.workers else None

    def is_agent_cut(self, node_id: str) -> bool:
        return node_id in self.agents


class Group:
    """Workers in ``silent`` and nodes in ``silent_nodes`` never answer; killing a worker's peers frees nobody here."""

    def __init__(self, *, silent: set[str], silent_nodes: set[str], unclean: frozenset[str] = frozenset()) -> None:
        self.lifelines: Any = Lines()
        self._silent, self._silent_nodes, self._unclean = silent, silent_nodes, unclean
        self.killed: list[str] = []
        self.asked: list[str] = []
        self.late: dict[str, Call] = {}  # answers of agents that are still to come
        self.unanswered: list[Call] = []
        self.is_process_alive = True

    def abandon(self, workers: list[str], attempt: Attempt, timeout_s: float) -> dict[Call, str]:
        del timeout_s
        self.asked += workers
        calls: dict[Call, str] = {}
        for worker in workers:
            report = AbandonReport(attempt=attempt, worker_id=worker, is_clean=worker not in self._unclean, last_step=1)
            calls[Call() if worker in self._silent else answered(report)] = worker
        self.unanswered += [call for call in calls if not call.done()]
        return calls

    def ping_agent(self, node_id: str) -> Call | None:
        if node_id in self.late:
            return self.late[node_id]
        return Call() if node_id in self._silent_nodes else answered(1)

    def fence(self, worker_id: str) -> Call | None:
        self.killed.append(worker_id)
        return Call() if worker_id.replace("w", "n") in self._silent_nodes else answered(())

    def ask_living(self, worker_id: str) -> Call | None:
        if worker_id.replace("w", "n") in self._silent_nodes:
            return Call()
        return answered((7,) if self.is_process_alive else ())


@pytest.fixture(autouse=True)
def _fake_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fencing, "ray", FakeRay)
    monkeypatch.setattr(vital_signs, "ray", FakeRay)
    monkeypatch.setattr(fencing, "_ABANDON_S", FOR_EVER_S)


def reckoning(
    group: Any,
    *,
    gone: set[str] = frozenset(),
    hung: set[str] = frozenset(),
    settle_s: float,  # type: ignore[assignment]
) -> Reckoning:
    return reckon(
        world=WORLD,
        group=group,
        living=frozenset({"n0", "n1", "n2"}),
        gone=frozenset(gone),
        hung=frozenset(hung),
        settle_s=settle_s,
    )


def test_a_machine_whose_lifelines_have_ended_is_lost_without_any_wait() -> None:
    """With a wait that lasts for ever, so that any is seen."""
    group = Group(silent={"w2"}, silent_nodes={"n2"})
    group.lifelines.workers.add("w2")
    group.lifelines.agents.add("n2")
    found = reckoning(group, settle_s=FOR_EVER_S)
    assert (found.survivors, found.lost_workers, found.lost_nodes) == ({"w0", "w1"}, ("w2",), ("n2",))
    assert not group.killed


def test_a_machine_that_dies_while_it_is_asked_is_not_waited_for_either() -> None:
    group = Group(silent={"w2"}, silent_nodes={"n2"})

    def die() -> None:
        group.lifelines.workers.add("w2")
        group.lifelines.agents.add("n2")
        group.lifelines.bell.ring()

    timer = threading.Timer(0.1, die)
    timer.start()
    assert reckoning(group, settle_s=FOR_EVER_S).lost_nodes == ("n2",)
    timer.join()


@pytest.mark.parametrize("sign", ["its agent's line stands", "its worker has answered"])
def test_a_node_that_shows_life_is_not_lost_because_its_agent_answers_late(sign: str) -> None:
    """Long after the time for silent nodes, as on a machine that is short of processors."""
    group = Group(silent={"w2"} if "line" in sign else set(), silent_nodes=set())
    late = Call()
    group.late["n2"] = late
    if "line" in sign:
        group.lifelines.held.add("n2")

    def answer() -> None:
        late.set_result(1)
        for call in group.unanswered:
            call.set_result(AbandonReport(attempt=ATTEMPT, worker_id="w2", is_clean=True, last_step=1))

    timer = threading.Timer(0.5, answer)
    timer.start()
    found = reckoning(group, settle_s=0.01)
    timer.join()
    assert (found.survivors, found.lost_workers, found.lost_nodes) == ({"w0", "w1", "w2"}, (), ())


def test_a_node_whose_agent_never_answers_is_lost_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fencing, "_ABANDON_S", 0.3)
    group = Group(silent=set(), silent_nodes={"n2"})
    group.lifelines.held |= {"n0", "n1", "n2"}
    found = reckoning(group, settle_s=0.01)
    assert (found.survivors, found.lost_nodes) == ({"w0", "w1"}, ("n2",))


@pytest.mark.parametrize("lives", [True, False])
def test_an_agent_that_has_died_alone_takes_no_member_along_that_answers(lives: bool) -> None:
    group = Group(silent=set() if lives else {"w2"}, silent_nodes=set())
    group.late["n2"] = Call()
    group.late["n2"].set_exception(ray.exceptions.ActorUnavailableError("it is started anew", None))
    found = reckoning(group, settle_s=0.1)
    lost = ((), ()) if lives else (("w2",), ("n2",))
    assert (found.lost_workers, found.lost_nodes) == lost
    assert (found.survivors, group.killed) == ({"w0", "w1", "w2"} - set(lost[0]), [])


def test_where_an_agent_has_died_a_member_whose_line_stands_has_its_time_to_let_go() -> None:
    """As one that frees a device's memory: longer than a node that shows no life is waited for."""
    group = Group(silent={"w2"}, silent_nodes=set())
    group.late["n2"] = Call()
    group.late["n2"].set_exception(ray.exceptions.ActorUnavailableError("it is started anew", None))
    group.lifelines.held.add("w2")

    def let_go() -> None:
        for call in group.unanswered:
            call.set_result(AbandonReport(attempt=ATTEMPT, worker_id="w2", is_clean=True, last_step=1))

    timer = threading.Timer(0.5, let_go)
    timer.start()
    found = reckoning(group, settle_s=0.01)
    timer.join()
    assert (found.survivors, found.lost_workers, found.lost_nodes) == ({"w0", "w1", "w2"}, (), ())


def test_answers_that_are_there_count_however_long_the_driver_was_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0])
    monkeypatch.setattr(fencing, "time", SimpleNamespace(monotonic=lambda: next(moments, FOR_EVER_S - 1)))
    found = reckoning(Group(silent=set(), silent_nodes=set()), settle_s=1.0)
    assert (found.survivors, found.lost_nodes) == ({"w0", "w1", "w2"}, ())


def test_a_machine_that_vanished_is_lost_once_it_had_its_time() -> None:
    """No line of it stands any more, or ever did."""
    group = Group(silent={"w2"}, silent_nodes={"n2"})
    found = reckoning(group, hung={"w2"}, settle_s=0.1)
    assert (found.survivors, found.lost_nodes) == ({"w0", "w1"}, ("n2",))


def test_a_dead_worker_costs_its_node_nothing() -> None:
    group = Group(silent=set(), silent_nodes=set())
    group.lifelines.workers.add("w1")
    found = reckoning(group, gone={"w1"}, settle_s=FOR_EVER_S)
    assert (found.survivors, found.lost_workers, found.lost_nodes) == ({"w0", "w2"}, ("w1",), ())
    assert "w1" not in group.asked


def test_a_broken_line_alone_makes_nobody_lost() -> None:
    group = Group(silent=set(), silent_nodes=set())
    group.lifelines.workers.add("w1")
    group.lifelines.agents.add("n2")
    found = reckoning(group, settle_s=FOR_EVER_S)
    assert (found.survivors, found.lost_nodes) == ({"w0", "w1", "w2"}, ())


def test_a_hung_worker_is_killed_and_one_that_cannot_let_go_too() -> None:
    group = Group(silent=set(), silent_nodes=set(), unclean=frozenset({"w0"}))
    found = reckoning(group, hung={"w1"}, settle_s=FOR_EVER_S)
    assert group.killed == ["w1", "w0"]
    assert (found.survivors, found.lost_workers, found.lost_nodes) == ({"w2"}, ("w0", "w1"), ())


def test_a_worker_whose_word_is_heard_after_the_reckoning_is_killed_then() -> None:
    group: Any = Group(silent=set(), silent_nodes=set())
    found = reckoning(group, hung={"w1"}, settle_s=FOR_EVER_S)
    late = fence_late(found, group, {"w1", "w2"}, settle_s=FOR_EVER_S)
    assert group.killed == ["w1", "w2"]
    assert (late.survivors, late.lost_workers) == ({"w0"}, ("w1", "w2"))
    assert fence_late(late, group, {"w1"}, settle_s=FOR_EVER_S) == late


def signs(group: Any) -> VitalSigns:
    return VitalSigns(WORLD, group, FailureConfig())


def test_an_ended_line_is_a_death_where_the_agent_says_so_or_is_gone_itself() -> None:
    group = Group(silent=set(), silent_nodes=set())
    vital = signs(group)
    vital.look_at_lines(())
    assert not vital.gone
    group.is_process_alive = False
    group.lifelines.workers |= {"w0", "w1"}
    group.lifelines.agents.add("n1")
    vital.look_at_lines(())
    assert set(vital.gone) == {"w0", "w1"}


def test_an_ended_line_of_a_living_process_is_none() -> None:
    group = Group(silent=set(), silent_nodes={"n2"})
    vital = signs(group)
    group.lifelines.workers |= {"w0", "w2"}
    for _ in range(3):
        vital.look_at_lines(())
    assert not vital.gone
    group.lifelines.agents.add("n2")  # its agent's line ends while that is still asked
    vital.look_at_lines(())
    assert set(vital.gone) == {"w2"}


def test_a_worker_that_has_told_its_outcome_may_go() -> None:
    group = Group(silent=set(), silent_nodes=set())
    group.is_process_alive = False
    group.lifelines.workers.add("w0")
    vital = signs(group)
    vital.look_at_lines({"w0"})
    assert not vital.gone
