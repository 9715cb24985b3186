"""The chaos schedule's language and its choices. Pure."""

from __future__ import annotations

import pytest

from orchestrator.chaos import ChaosAction, ChaosSchedule, ChaosVerb, parse_chaos
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
    text = f"{verb}@7" + (":1.5s" if verb is ChaosVerb.DRAIN_NODE else "")
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
