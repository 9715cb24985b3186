"""The chaos schedule's language and its choices. Pure."""

from __future__ import annotations

import pytest

from orchestrator.chaos import ChaosAction, ChaosPhase, ChaosSchedule, ChaosVerb, check_targets, parse_chaos
from orchestrator.errors import ChaosSpecError


def test_a_schedule_is_read_and_ordered_by_step() -> None:
    assert parse_chaos("add-node@80, kill-node:2@40,drain-node@75:20s,kill-driver@90") == (
        ChaosAction(verb=ChaosVerb.KILL_NODE, step=40, target=2),
        ChaosAction(verb=ChaosVerb.DRAIN_NODE, step=75, notice_s=20.0),
        ChaosAction(verb=ChaosVerb.ADD_NODE, step=80),
        ChaosAction(verb=ChaosVerb.KILL_DRIVER, step=90),
    )


@pytest.mark.parametrize("verb", list(ChaosVerb))
def test_every_verb_can_be_written_and_prints_as_it_was_written(verb: ChaosVerb) -> None:
    name = f"{verb}:3" if verb is ChaosVerb.SCALE else verb
    text = f"{name}@7" + (":1.5s" if verb in (ChaosVerb.DRAIN_NODE, ChaosVerb.STORE_OUTAGE) else "")
    assert [str(action) for action in parse_chaos(text)] == [text]


@pytest.mark.parametrize(
    ("spec", "part", "said"),
    [
        ("kill-node@4,zap@5", "zap@5", "kill-node, add-node, kill-worker, stop-worker, drain-node, kill-driver"),
        ("", "", "no such verb"),
        ("kill-node@40,", "", "no such verb"),
        ("kill-node", "kill-node", "the step is missing"),
        ("kill-node@soon", "kill-node@soon", "'soon' is not a step"),
        ("kill-node@0", "kill-node@0", "'0' is not a step"),
        ("kill-node@-3", "kill-node@-3", "'-3' is not a step"),
        ("kill-node:head@3", "kill-node:head@3", "the head is never a target"),
        ("kill-node:0@3", "kill-node:0@3", "nodes count from 1"),
        ("add-node:2@3", "add-node:2@3", "add-node takes no node"),
        ("kill-node@3:20s", "kill-node@3:20s", "takes no notice"),
        ("drain-node@3", "drain-node@3", "needs its notice in seconds"),
        ("drain-node@3:soon", "drain-node@3:soon", "needs its notice in seconds"),
        ("store-outage@3", "store-outage@3", "needs its length in seconds"),
        ("store-outage@3:0s", "store-outage@3:0s", "needs its length in seconds"),
        ("slow-node@3:fast", "slow-node@3:fast", "needs how long it lasts in seconds"),
        ("scale@3", "scale@3", "scale needs the number of workers wanted, e.g. scale:3@40"),
        ("scale:0@3", "scale:0@3", "scale needs the number of workers"),
        ("scale:2@3:9s", "scale:2@3:9s", "takes no notice"),
        ("restart-head:1@3", "restart-head:1@3", "restart-head takes no node"),
        ("kill-node@during-lunch", "kill-node@during-lunch", "'lunch' is not a phase; expected one of: save, load"),
        ("kill-node@40+lunch", "kill-node@40+lunch", "'lunch' is not a phase"),
        ("kill-node@0+save", "kill-node@0+save", "is not a step"),
        ("kill-node@during-", "kill-node@during-", "is not a step"),
    ],
)  # fmt: skip
def test_an_error_names_the_bad_part_and_what_was_expected(spec: str, part: str, said: str) -> None:
    with pytest.raises(ChaosSpecError) as caught:
        parse_chaos(spec)
    assert caught.value.part == part
    assert said in str(caught.value)


def test_each_action_is_handed_out_once_even_when_steps_are_run_again() -> None:
    schedule = ChaosSchedule(parse_chaos("kill-node@40,add-node@42"), seed=0)
    assert schedule.due(39) == ()
    assert [str(action) for action in schedule.due(41)] == ["kill-node@40"]
    assert schedule.due(40) == ()
    assert [str(action) for action in schedule.due(50)] == ["add-node@42"]
    assert schedule.pending == ()


def test_the_same_seed_hits_the_same_nodes_and_another_seed_does_not() -> None:
    action = ChaosAction(verb=ChaosVerb.KILL_NODE, step=1)

    def targets(seed: int) -> list[int]:
        schedule = ChaosSchedule([], seed=seed)
        return [schedule.choose(action, range(1, 9)) for _ in range(16)]

    assert targets(5) == targets(5)
    assert targets(5) != targets(6)
    assert set(targets(5)) <= set(range(1, 9))


def test_the_order_in_which_live_nodes_are_listed_does_not_matter() -> None:
    action = ChaosAction(verb=ChaosVerb.KILL_NODE, step=1)
    one, other = ChaosSchedule([], seed=3), ChaosSchedule([], seed=3)
    assert [one.choose(action, [1, 2, 3])] == [other.choose(action, [3, 1, 2])]


def test_a_named_target_is_hit_when_alive_and_refused_when_not() -> None:
    schedule = ChaosSchedule([], seed=0)
    action = ChaosAction(verb=ChaosVerb.KILL_NODE, step=40, target=2)
    assert schedule.choose(action, [1, 2, 3]) == 2
    with pytest.raises(ChaosSpecError, match="node 2 is not alive; live nodes: 1, 3"):
        schedule.choose(action, [1, 3])


def test_without_live_nodes_the_choice_is_refused() -> None:
    with pytest.raises(ChaosSpecError, match="no node is left"):
        ChaosSchedule([], seed=0).choose(ChaosAction(verb=ChaosVerb.KILL_NODE, step=4), [])


def test_what_lasts_may_be_given_its_length_and_prints_it() -> None:
    for text in ("slow-node:2@7:30s", "slow-node@7", "disk-full@7:1.5s", "disk-full:1@7", "store-outage@7:60s"):
        assert [str(action) for action in parse_chaos(text)] == [text]


def test_a_fault_may_wait_for_a_phase_and_for_a_step_before_it() -> None:
    texts = ["kill-node:2@during-load", "kill-keeper@during-regroup", "kill-worker@40+save"]
    actions = parse_chaos(",".join(reversed(texts)))
    assert sorted(str(action) for action in actions) == sorted(texts)
    assert {(action.step, action.phase) for action in actions} == {
        (0, ChaosPhase.LOAD),
        (0, ChaosPhase.REGROUP),
        (40, ChaosPhase.SAVE),
    }


def test_phases_begin_with_their_events_and_each_fault_strikes_once() -> None:
    schedule = ChaosSchedule(
        parse_chaos("kill-node@during-load,kill-worker@40+save,kill-keeper@during-regroup"), seed=0
    )
    assert schedule.due(1000) == ()
    fresh, restored = (
        {"event": "attempt_started", "restored_step": 0},
        {"event": "attempt_started", "restored_step": 30},
    )
    assert schedule.due_at(fresh, 0) == ()
    assert [str(action) for action in schedule.due_at(restored, 31)] == ["kill-node@during-load"]
    assert schedule.due_at(restored, 31) == ()
    assert schedule.due_at({"event": "save_bound"}, 39) == ()
    assert [str(action) for action in schedule.due_at({"event": "save_bound"}, 40)] == ["kill-worker@40+save"]
    assert [str(action) for action in schedule.due_at({"event": "fault"}, 41)] == ["kill-keeper@during-regroup"]
    assert schedule.pending == ()


@pytest.mark.parametrize(
    ("spec", "num_nodes", "said"),
    [
        ("kill-node:5@40", 4, "there is no node 5 then; nodes: 1 to 4"),
        ("kill-node:5@40,add-node@41", 4, "there is no node 5 then"),
        ("kill-node:6@during-save,add-node@41", 4, "there is no node 6 then; nodes: 1 to 5"),
        ("kill-node:2@40,kill-worker:2@50", 4, "node 2 is gone by then, after kill-node:2@40"),
        ("cut-node:1@40,slow-node:1@50", 2, "node 1 is gone by then"),
        ("kill-node@40,kill-node@41,kill-worker@42", 2, "no node is left by then"),
    ],
)
def test_a_target_that_cannot_be_there_is_refused_before_the_start(spec: str, num_nodes: int, said: str) -> None:
    with pytest.raises(ChaosSpecError, match=said):
        check_targets(parse_chaos(spec), num_nodes)


@pytest.mark.parametrize(
    "spec",
    [
        "kill-node:1@40,kill-node:2@40",
        "add-node@30,kill-node:3@40",
        "drain-node:2@40:20s,kill-node:2@45",
        "kill-node@40,kill-worker:2@50",
        "kill-node:3@during-save,add-node@90",
        "kill-node@40,kill-node@41,add-node@42,kill-worker@43",
        "kill-driver@3,store-outage@4:5s,restart-head@5",
    ],
)
def test_a_schedule_that_may_come_true_is_accepted(spec: str) -> None:
    check_targets(parse_chaos(spec), 2)
