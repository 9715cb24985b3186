"""The failure history on a fake clock: what counts, over one driver and over several."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.cluster_news import ClusterNews
from orchestrator.failure_history import FIELD, FailureHistory, Totals, totals_from
from orchestrator.failure_policy import FaultKind
from orchestrator.hazard import node_rate
from orchestrator.journal import JournalEntry
from orchestrator.node_watcher import ClusterView, NodeView
from orchestrator.save_config import HazardConfig
from orchestrator.save_facts import ClusterFacts, Notice
from storage.events import utc_text

BEGAN_UNIX_S = 1_800_000_000.0


class Clock:
    """Seconds of one machine; as Unix time it began at ``BEGAN_UNIX_S``."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def unix(self) -> float:
        return BEGAN_UNIX_S + self.now_s


def history_of(clock: Clock, totals: Totals | None = None) -> FailureHistory:
    return FailureHistory(totals, clock=clock.monotonic, wall_clock=clock.unix)


def entry(kind: str, clock: Clock, **fields: Any) -> JournalEntry:
    return JournalEntry(sequence=1, kind=kind, time_utc=utc_text(clock.unix()), fields=fields)


def attempt_entry(clock: Clock, history: FailureHistory, *nodes: str) -> JournalEntry:
    world = [[f"w{place}", node_id] for place, node_id in enumerate(nodes)]
    return entry("attempt", clock, world=world, **{FIELD: history.as_entry()})


@pytest.mark.parametrize(
    ("kind", "faults", "preemptions"),
    [
        (FaultKind.NODE_LOST, 1, 0),
        (FaultKind.WORKER_LOST, 1, 0),
        (FaultKind.HANG, 1, 0),
        (FaultKind.COLLECTIVE, 1, 0),
        (FaultKind.OUT_OF_MEMORY, 1, 0),
        (FaultKind.PREEMPTION, 0, 1),
        (FaultKind.USER_ERROR, 0, 0),
        (FaultKind.BAD_STEP, 0, 0),
        (FaultKind.STORAGE, 0, 0),
        (FaultKind.MEMORY, 0, 0),
        (FaultKind.MISMATCH, 0, 0),
        (FaultKind.CORRUPT_CHECKPOINT, 0, 0),
    ],
)
def test_only_losses_and_hangs_are_faults_and_notices_are_counted_apart(
    kind: FaultKind, faults: int, preemptions: int
) -> None:
    history = history_of(Clock())
    history.note_fault(kind)
    facts = history.facts(["a"])
    assert (facts.faults, facts.preemptions) == (faults, preemptions)


def test_a_fault_that_memory_survives_is_counted_apart_and_kept_over_drivers() -> None:
    clock = Clock()
    history = history_of(clock)
    for kind, is_memory in (
        (FaultKind.NODE_LOST, True),
        (FaultKind.WORKER_LOST, False),
        (FaultKind.PREEMPTION, True),
        (FaultKind.HANG, True),
    ):
        history.note_fault(kind)
        history.note_source(is_memory=is_memory)
    history.note_source(is_memory=True)  # after a join
    facts = history.facts(["a"])
    assert (facts.faults, facts.survived, facts.preemptions) == (3, 2, 1)
    again = history_of(clock, totals_from([attempt_entry(clock, history, "a"), entry("end", clock)]))
    assert (again.facts(["a"]).faults, again.facts(["a"]).survived) == (3, 2)


def test_only_time_in_which_a_world_trains_is_exposure() -> None:
    clock = Clock()
    history = history_of(clock)
    clock.now_s = 100.0  # workers start
    history.note_running(4)
    clock.now_s = 160.0
    assert history.facts(["a"]).exposure_node_s == pytest.approx(240.0)
    history.note_running(0)
    clock.now_s = 1000.0  # below the minimum
    history.note_running(3)
    clock.now_s = 1010.0
    assert history.facts(["a"]).exposure_node_s == pytest.approx(240.0 + 30.0)


def test_a_second_driver_goes_on_from_what_the_first_wrote_and_the_pause_between_does_not_count() -> None:
    clock = Clock()
    first = history_of(clock)
    first.note_nodes(["a", "b"])
    attempt = attempt_entry(clock, first, "a", "b")
    first.note_running(2)
    clock.now_s = 500.0
    first.note_running(0)
    first.note_fault(FaultKind.NODE_LOST)
    decision = entry("decision", clock, **{FIELD: first.as_entry()})
    first.note_running(1)
    clock.now_s = 600.0
    first.note_running(0)
    end = entry("end", clock, **{FIELD: first.as_entry()})
    clock.now_s = 90_000.0
    second = history_of(clock, totals_from([attempt, decision, end], trained_until_s=clock.unix()))
    second.note_nodes(["b", "c"])
    facts = second.facts(["b", "c"])
    assert (facts.faults, facts.preemptions) == (1, 0)
    assert facts.exposure_node_s == pytest.approx(1100.0)
    assert facts.node_ages_s == pytest.approx((90_000.0, 0.0))


def test_a_driver_that_was_killed_is_a_fault_after_the_training_that_is_on_record() -> None:
    clock = Clock()
    first = history_of(clock)
    attempt = attempt_entry(clock, first, "a", "a", "b")
    killed_at_s = BEGAN_UNIX_S + 400.0
    totals = totals_from([attempt], trained_until_s=killed_at_s)
    assert totals.faults == 1
    assert totals.exposure_node_s == pytest.approx(800.0)


def test_a_size_that_was_written_meanwhile_does_not_count_the_time_before_it_again() -> None:
    clock = Clock()
    first = history_of(clock)
    attempt = attempt_entry(clock, first, "a", "b")
    first.note_running(2)
    clock.now_s = 300.0
    scale = entry("scale", clock, **{FIELD: first.as_entry()})
    totals = totals_from([attempt, scale], trained_until_s=BEGAN_UNIX_S + 400.0)
    assert totals.faults == 1
    assert totals.exposure_node_s == pytest.approx(800.0)


def test_a_killed_driver_is_counted_once_whatever_the_next_one_wrote_before_it_died_without_a_world() -> None:
    clock = Clock()
    first = history_of(clock)
    attempt = attempt_entry(clock, first, "a", "b")
    trained_until_s = BEGAN_UNIX_S + 400.0
    clock.now_s = 1000.0
    second = history_of(clock, totals_from([attempt], trained_until_s=trained_until_s))
    scale = entry("scale", clock, **{FIELD: second.as_entry()})
    totals = totals_from([attempt, scale], trained_until_s=trained_until_s)
    assert totals.faults == 1
    assert totals.exposure_node_s == pytest.approx(800.0)


def test_a_killed_driver_that_trained_nothing_adds_no_exposure() -> None:
    clock = Clock()
    clock.now_s = 1000.0
    attempt = attempt_entry(clock, history_of(clock), "a")
    for trained_until_s in (None, BEGAN_UNIX_S):
        totals = totals_from([attempt], trained_until_s=trained_until_s)
        assert (totals.faults, totals.exposure_node_s) == (1, 0.0)


def test_a_driver_that_died_while_it_waited_for_nodes_is_no_fault() -> None:
    clock = Clock()
    first = history_of(clock)
    attempt = attempt_entry(clock, first, "a")
    first.note_fault(FaultKind.NODE_LOST)
    decision = entry("decision", clock, **{FIELD: first.as_entry()})
    assert totals_from([attempt, decision], trained_until_s=BEGAN_UNIX_S + 1e6).faults == 1


def test_a_journal_without_a_history_begins_one() -> None:
    assert totals_from([]) == Totals(seen_at_s={})
    old = entry("attempt", Clock(), world=[["w0", "a"]])
    assert totals_from([old, entry("end", Clock())]) == Totals(seen_at_s={})


def test_ten_faults_over_two_drivers_give_the_rate_of_all_of_them() -> None:
    clock = Clock()
    config = HazardConfig(prior_weight=1e-9)
    first = history_of(clock)
    entries = []
    for _ in range(9):
        first.note_running(2)
        clock.now_s += 500.0
        first.note_running(0)
        first.note_fault(FaultKind.WORKER_LOST)
        clock.now_s += 77.0
    entries = [entry("decision", clock, **{FIELD: first.as_entry()}), attempt_entry(clock, first, "a", "b")]
    totals = totals_from(entries, trained_until_s=clock.unix() + 500.0)
    facts = history_of(clock, totals).facts(["a", "b"])
    assert 1.0 / node_rate(facts, config) == pytest.approx(1000.0)


class Told:
    """What was told, newest last; and the cluster it is told of."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.facts: list[ClusterFacts] = []
        self.deadlines: dict[str, float | None] = {"a": None, "b": None}
        self.hands_over = False
        self.news = ClusterNews(
            history=history_of(clock),
            view=self._view,
            tell=self.facts.append,
            hands_over=lambda: self.hands_over,
            clock=clock.monotonic,
            wall_clock=clock.unix,
        )

    def _view(self) -> ClusterView:
        nodes = [
            NodeView(node_id=node_id, is_alive=True, resources={}, drain_deadline_at_s=at_s)
            for node_id, at_s in self.deadlines.items()
        ]
        return ClusterView(nodes={node.node_id: node for node in nodes})


def test_the_coordinator_is_told_at_the_beginning_when_a_notice_comes_and_each_minute() -> None:
    clock = Clock()
    told = Told(clock)
    told.news.follow()
    assert told.facts == []
    told.news.begin(["a", "a"], state_bytes=5)
    assert told.facts == [ClusterFacts(num_nodes=1, num_ranks=2, node_ages_s=(0.0,), state_bytes=5)]
    clock.now_s = 30.0
    told.news.follow()
    told.deadlines["b"] = clock.unix() + 10.0  # not of this World
    told.news.follow()
    assert len(told.facts) == 1
    told.deadlines["a"] = clock.unix() + 120.0
    told.news.follow()
    told.news.follow()
    assert len(told.facts) == 2
    assert told.facts[-1].notices == (Notice(node_id="a", deadline_in_s=120.0),)
    clock.now_s = 90.0
    told.news.follow()
    assert len(told.facts) == 3
    assert told.facts[-1].notices == (Notice(node_id="a", deadline_in_s=60.0),)
    assert told.facts[-1].node_ages_s == (90.0,)


def test_a_notice_that_memory_covers_is_told_once_it_does_not_any_more() -> None:
    clock = Clock()
    told = Told(clock)
    told.hands_over = True
    told.deadlines["a"] = clock.unix() + 120.0
    told.news.begin(["a"], state_bytes=5)
    told.hands_over = False
    told.news.follow()
    assert [facts.notices for facts in told.facts] == [(), (Notice(node_id="a", deadline_in_s=120.0),)]


def test_a_notice_without_a_deadline_is_told_as_one() -> None:
    told = Told(Clock())
    told.deadlines["a"] = 0.0
    told.news.begin(["a", "b"], state_bytes=None)
    assert told.facts[-1].notices == (Notice(node_id="a", deadline_in_s=None),)
    assert told.facts[-1].num_nodes == 2
