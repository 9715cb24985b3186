"""What a drill calls the same run: step by step, of the history that counts. Pure, on the events of imagined runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from orchestrator.chaos import ChaosAction, ChaosVerb
from orchestrator.drill_compare import Comparison, compare
from orchestrator.drill_history import History, read_history
from orchestrator.drill_rules import EVALUATION, EXACT, LOSS_SCALE, OWN, ROUNDED, Rules
from tests.fakes.drill_events import Change, DrillEvents

STEPS = 20
PLANNED = "kill-worker@8"


def unbroken() -> History:
    return read_history(DrillEvents().begin(4).train(STEPS).end())


def interrupted(changes: Mapping[int, Change] | None = None, *, size: int = 3, digest: str | None = None) -> History:
    """Killed at step 8, gone on from step 6 with ``size`` workers."""
    run = DrillEvents(changes).begin(4).train(8).strike("kill-worker", 8)
    return read_history(run.begin(size, restored=6, cause="worker-lost").train(STEPS).end(digest))


def plan(text: str) -> list[ChaosAction]:
    """``verb@step`` by commas, bare of notices and the like."""
    parts = [part.split("@") for part in text.split(",") if part]
    return [ChaosAction(verb=ChaosVerb(verb), step=int(step)) for verb, step in parts]


def judged(
    other: History, rules: Rules = EXACT, planned: str = PLANNED, undone: Mapping[str, str] | None = None
) -> Comparison:
    return compare(unbroken(), other, rules=rules, num_steps=STEPS, planned=plan(planned), undone=undone)


def setting(name: str, value: Any) -> Change:
    return lambda event: event.update({name: value})


def scaling(name: str, factor: float) -> Change:
    return lambda event: event.update({name: event[name] * factor})


def test_an_interrupted_run_with_the_same_values_is_the_same() -> None:
    found = judged(interrupted())
    assert (found.is_same, found.first, found.problems) == (True, (), ())
    assert set(found.num_compared.values()) == {STEPS}
    assert EXACT.keys() - found.num_compared.keys() == {EVALUATION, LOSS_SCALE, OWN}
    assert found.world_differs_at == 7


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("loss", scaling("loss", 1 + 1e-15)),
        ("grad_norm", scaling("grad_norm", 1 + 1e-15)),
        ("lr", scaling("lr", 1 + 1e-15)),
        ("tokens", setting("tokens", 1)),
        ("position", setting("position", 1)),
        ("sample_chain", setting("sample_chain", "other")),
        ("weights_digest", setting("weights_digest", "other")),
        ("optimizer_digest", setting("optimizer_digest", "other")),
        ("schedule_digest", setting("schedule_digest", "other")),
        ("rest_digest", setting("rest_digest", "other")),
        ("rng_digest", setting("rng_digest", "other")),
        ("loss_scale", setting("loss_scale", 2.0)),
    ],
)
def test_where_bits_are_promised_one_in_any_quantity_is_a_difference(name: str, change: Change) -> None:
    found = judged(interrupted({11: change}))
    assert not found.is_same
    assert [(one.step, one.quantity.field) for one in found.first] == [(11, name)]
    assert found.num_differing == {found.first[0].quantity: 1}


def test_the_first_difference_has_both_values_its_size_and_the_fault_before_it() -> None:
    changes = {step: scaling("loss", 1 + step * 1e-3) for step in (9, 10, 12)}
    found = judged(interrupted(changes))
    first = found.first[0]
    expected = 1 + math.exp(-1)
    assert (first.step, first.unbroken, first.interrupted) == (9, expected, expected * 1.009)
    assert str(found.last_strike) == "kill-worker at step 8 (node 2)"
    assert found.largest[first.quantity].step == 12
    assert found.num_differing[first.quantity] == 3


def test_a_difference_before_any_fault_blames_none() -> None:
    found = judged(interrupted({4: scaling("loss", 1.5)}))
    assert (found.first[0].step, found.last_strike) == (4, None)


def test_everything_that_differs_at_that_step_is_told_in_the_order_in_which_a_step_comes_about() -> None:
    def change(event: dict[str, Any]) -> None:
        event.update(loss=9.0, weights_digest="w", optimizer_digest="o", position=3)

    found = judged(interrupted({9: change}))
    assert [one.quantity.field for one in found.first] == ["position", "loss", "optimizer_digest", "weights_digest"]


def test_what_was_rolled_back_does_not_count() -> None:
    times: list[int] = []

    def only_at_first(event: dict[str, Any]) -> None:
        if not times:
            event["loss"] = 77.0
        times.append(8)

    history = interrupted({8: only_at_first})
    assert len(times) == 2
    assert judged(history).is_same
    assert history.num_rolled_back == 2


def test_a_step_that_was_rolled_back_before_its_event_was_written_counts_as_made_again() -> None:
    run = DrillEvents().begin(4).train(8).strike("kill-worker", 8)
    run.emit("attempt_ended", attempt=1, last_step=9, reason="broken")
    history = read_history(run.begin(3, restored=8, cause="worker-lost").train(STEPS).end())
    assert history.num_rolled_back == history.recoveries[0]["lost_steps"] == 1


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [("loss", 0.9e-4, 1.1e-4), ("grad_norm", 0.9e-3, 1.1e-3), ("lr", 0.9e-9, 1.1e-9)],
)
def test_where_sums_are_rounded_each_number_has_its_tolerance(name: str, allowed: float, refused: float) -> None:
    assert judged(interrupted({11: scaling(name, 1 + allowed)}), ROUNDED).is_same
    found = judged(interrupted({11: scaling(name, 1 - refused)}), ROUNDED)
    assert [(one.step, one.quantity.field) for one in found.first] == [(11, name)]


@pytest.mark.parametrize("name", ["weights_digest", "optimizer_digest", "rest_digest", "rng_digest"])
def test_digests_are_held_to_the_bit_only_while_the_worlds_have_one_size(name: str) -> None:
    late, early = {12: setting(name, "other")}, {5: setting(name, "other")}
    assert judged(interrupted(late, size=3, digest="another"), ROUNDED).is_same
    assert not judged(interrupted(late, size=4), ROUNDED).is_same, "a worker was replaced: nothing is rounded otherwise"
    assert not judged(interrupted(early, size=3), ROUNDED).is_same


def evaluated(loss: float | None, at: int = 10) -> History:
    run = (
        DrillEvents().begin(4).train(8).strike("kill-worker", 8).begin(3, restored=6, cause="worker-lost").train(at - 1)
    )
    if loss is not None:
        run.emit("eval", step=at, attempt=2, loss=loss)
    return read_history(run.train(STEPS).end())


def test_evaluations_are_compared_where_both_runs_made_one() -> None:
    def judge(one: float | None, other: float | None, rules: Rules) -> list[str]:
        lone = DrillEvents().begin(4).train(9)
        if one is not None:
            lone.emit("eval", step=10, attempt=1, loss=one)
        reference = read_history(lone.train(STEPS).end())
        found = compare(reference, evaluated(other), rules=rules, num_steps=STEPS, planned=plan(PLANNED))
        return [first.quantity.field for first in found.first]

    assert judge(2.0, 2.0, EXACT) == judge(2.0, None, EXACT) == judge(None, 2.0, EXACT) == []
    assert judge(2.0, 2.0 + 1e-12, EXACT) == ["eval_loss"]
    assert judge(2.0, 2.0 + 1e-5, ROUNDED) == []
    assert judge(2.0, 2.0 + 1e-3, ROUNDED) == ["eval_loss"]


@pytest.mark.parametrize("rules", [EXACT, ROUNDED])
def test_what_rank_0_keeps_for_itself_is_compared_while_it_has_the_same_leaves(rules: Rules) -> None:
    early, late = ({step: setting("own_digest", "other")} for step in (5, 12))
    assert judged(interrupted(late, size=3), rules).is_same
    assert not judged(interrupted(late, size=4), rules).is_same
    assert not judged(interrupted(early, size=3), rules).is_same


@pytest.mark.parametrize("name", ["sample_chain", "position", "tokens", "schedule_digest"])
def test_samples_and_schedule_are_exact_at_any_number_of_workers(name: str) -> None:
    assert not judged(interrupted({12: setting(name, 0)}), ROUNDED).is_same


def test_a_loss_that_is_no_number_is_equal_to_itself_alone() -> None:
    nan = {11: setting("loss", math.nan)}
    both = read_history(DrillEvents(nan).begin(4).train(STEPS).end())
    assert compare(both, interrupted(nan), rules=EXACT, num_steps=STEPS, planned=plan(PLANNED)).is_same
    found = judged(interrupted(nan), ROUNDED)
    assert (found.first[0].step, found.first[0].size) == (11, math.inf)


# -- what proves nothing ----------------------------------------------------------------------------------------------


def test_a_run_that_nothing_interrupted_proves_nothing() -> None:
    found = judged(unbroken(), planned="")
    assert not found.is_same
    assert found.problems == ("nothing was interrupted: the second run went through in one attempt as well",)


def test_every_fault_must_have_happened_each_once() -> None:
    planned = "kill-worker@8,kill-worker@8,drain-node@12"
    found = judged(interrupted(), planned=planned)
    assert found.problems == ("kill-worker@8 never happened", "drain-node@12 never happened")


def test_why_a_fault_never_happened_is_said_and_what_would_help() -> None:
    late, refused = (
        ChaosAction(verb=ChaosVerb.SCALE, step=8, workers=1),
        ChaosAction(verb=ChaosVerb.SCALE, step=8, workers=9),
    )
    run = DrillEvents().begin(4).train(8).strike("kill-worker", 8).strike("scale", 8)
    history = read_history(run.begin(3, restored=6, cause="worker-lost").train(STEPS).end())

    def problems(undone: Mapping[str, str]) -> tuple[str, ...]:
        return compare(unbroken(), history, rules=EXACT, num_steps=STEPS, undone=undone,
                       planned=[late, refused, *plan(PLANNED)]).problems  # fmt: skip

    assert problems({str(refused): "the driver refused: too many"}) == (
        "scale:9@8 never happened: the driver refused: too many",
    )
    why = "the driver ended before it answered, DriverGone: aaaaaaaa"
    assert problems({str(late): why}) == (
        f"scale:1@8 never happened: {why}; more steps (--steps), or longer ones, give it time",
    )
    assert problems({}) == ("scale:9@8 never happened",)


def test_a_fault_that_hit_an_idle_node_is_said_by_name_and_blamed_for_nothing() -> None:
    run = DrillEvents({15: scaling("loss", 2)}).begin(3).train(8).strike("kill-worker", 8, "a worker of node 2")
    run.begin(3, restored=6, cause="worker-lost").train(12).strike("kill-node", 12, "node 9", pid=99)
    history = read_history(run.begin(3, restored=12, cause="join", kept=3).train(STEPS).end())
    found = judged(history, planned="kill-worker@8,kill-node@12")
    why = "nothing that it hit was training, or the run was over before it was missed"
    assert found.problems == (f"kill-node at step 12 (node 9) interrupted nothing: {why}",)
    assert found.last_strike is not None
    assert found.last_strike.verb == "kill-worker"


@pytest.mark.parametrize("verb", ["kill-worker", "stop-worker", "kill-node", "drain-node", "kill-driver"])
def test_a_fault_after_which_no_new_attempt_came_interrupted_nothing(verb: str) -> None:
    run = DrillEvents().begin(3).train(8).strike("kill-worker", 8).begin(3, restored=6, cause="worker-lost")
    history = read_history(run.train(STEPS - 1).strike(verb, 19).train(STEPS).end())
    (problem,) = judged(history, planned=f"kill-worker@8,{verb}@19").problems
    assert problem.startswith(f"{verb} at step 19 (node 2) interrupted nothing: ")


@pytest.mark.parametrize("verb", ["stop-worker", "drain-node", "oom-worker", "raise-in-worker"])
def test_what_strikes_with_a_delay_has_interrupted_once_the_run_goes_on_without_it_or_a_fault_names_it(
    verb: str,
) -> None:
    def problems(*, is_named: bool = False, cause: str = "join", kept: int = 3) -> tuple[str, ...]:
        run = DrillEvents().begin(3).train(8).strike(verb, 8)
        if is_named:
            run.emit("fault", cause="hang", workers=["w1"], nodes=[])
        run.begin(4, restored=8, cause=cause, kept=kept)
        return judged(read_history(run.train(STEPS).end()), planned=f"{verb}@8").problems

    assert problems(kept=2) == problems(is_named=True) == ()
    assert len(problems()) == len(problems(cause="driver-restart", kept=0)) == 1


def test_what_died_between_two_worlds_has_interrupted_the_one_that_was_formed_with_it() -> None:
    run = DrillEvents().begin(2).train(8).strike("kill-worker", 8)
    run.add_worker()
    run.strike("kill-worker", 9, pid=3)
    run.begin(2, restored=6, cause="worker-lost", kept=2).begin(1, restored=6, cause="worker-lost", kept=0)
    history = read_history(run.train(STEPS).end())
    assert judged(history, planned="kill-worker@8,kill-worker@9").is_same


@pytest.mark.parametrize("verb", ["slow-node", "kill-keeper", "add-node", "scale", "store-outage"])
def test_what_need_not_interrupt_is_not_asked_whether_it_did(verb: str) -> None:
    run = DrillEvents().begin(4).train(4).strike(verb, 4).train(8).strike("kill-worker", 8)
    history = read_history(run.begin(3, restored=6, cause="worker-lost").train(STEPS).end())
    assert judged(history, planned=f"{verb}@4,kill-worker@8").is_same


@pytest.mark.parametrize("kept", [0, 2, 3])
def test_what_no_fresh_process_went_on_with_proves_nothing(kept: int) -> None:
    run = DrillEvents().begin(4).train(8).strike("kill-worker", 8)
    run.begin(3, restored=6, cause="worker-lost", kept=kept)
    found = judged(read_history(run.train(STEPS).end()))
    assert found.is_same == (kept < 3)
    assert all("no step was made by a fresh process" in problem for problem in found.problems)


def test_a_fresh_process_that_made_no_step_that_counts_is_none() -> None:
    run = DrillEvents().begin(4).train(4).strike("kill-worker", 4).begin(4, restored=0, cause="worker-lost").train(8)
    run.strike("kill-worker", 8).begin(3, restored=6, cause="worker-lost", kept=3)
    history = read_history(run.train(STEPS).end())
    planned = "kill-worker@4,kill-worker@8"
    assert ["fresh process" in problem for problem in judged(history, planned=planned).problems] == [True]


def test_a_process_of_the_next_driver_is_fresh_although_its_worker_has_an_old_name() -> None:
    run = DrillEvents().begin(1).train(8).strike("kill-driver", 8)
    run.emit("worker_ready", worker="w1", node_id="n1", pid=99)
    run.begin(1, restored=8, cause="driver-restart", kept=1)
    assert judged(read_history(run.train(STEPS).end()), planned="kill-driver@8").is_same


def test_a_spare_that_waited_from_the_beginning_is_fresh_when_it_steps_in() -> None:
    run = DrillEvents().begin(3)
    run.add_worker()
    run.train(8).strike("kill-worker", 8).begin(3, restored=6, cause="worker-lost", kept=3)
    assert judged(read_history(run.train(STEPS).end())).is_same


def test_steps_that_are_missing_or_not_traced_are_no_proof() -> None:
    run = DrillEvents({5: lambda event: event.pop("weights_digest")}).begin(4).train(8).strike("kill-worker", 8)
    history = read_history(run.begin(3, restored=6, cause="worker-lost").train(15).end("weights-20"))
    found = judged(history)
    assert "the interrupted run did not make 5 of 20 steps: 16, 17, 18, 19, 20" in found.problems
    assert any("1 steps of the interrupted run, from 5 on, have no digests" in problem for problem in found.problems)


def test_steps_whose_events_died_with_a_driver_are_not_missing() -> None:
    run = DrillEvents().begin(4).train(8).strike("kill-driver", 8)
    history = read_history(run.begin(4, restored=10, cause="driver-restart").train(STEPS).end())
    found = judged(history, planned="kill-driver@8")
    assert found.is_same
    assert history.untold == {9, 10}


def test_events_that_died_with_a_driver_after_a_step_was_rolled_back_are_not_missing() -> None:
    run = DrillEvents().begin(4).train(12).strike("kill-worker", 12)
    run.begin(4, restored=6, cause="worker-lost").train(7).strike("kill-driver", 7)
    history = read_history(run.begin(4, restored=10, cause="driver-restart").train(STEPS).end())
    assert history.untold == {8, 9, 10}, "steps 8 to 10 were told of before, and rolled back"
    assert judged(history, planned="kill-worker@12,kill-driver@7").is_same


def test_nothing_in_common_is_no_proof() -> None:
    run = DrillEvents().begin(4).strike("kill-driver", 1)
    history = read_history(run.begin(4, restored=STEPS, cause="driver-restart").end("weights-20"))
    found = judged(history, planned="kill-driver@1")
    assert found.problems == ("there is no step that both runs tell of",)


def test_a_reference_that_was_interrupted_itself_is_none() -> None:
    reference = interrupted()
    found = compare(reference, interrupted(), rules=EXACT, num_steps=STEPS, planned=plan(PLANNED))
    assert found.problems == ("the uninterrupted run was interrupted itself: worker-lost",)


def test_the_weights_at_the_end_must_be_those_that_the_runs_ended_with() -> None:
    found = judged(interrupted(digest="other"))
    assert found.problems == ("the weights at the end: weights-20 uninterrupted, other interrupted",)


def test_late_lines_of_an_older_attempt_change_nothing() -> None:
    run = DrillEvents().begin(4).train(8).strike("kill-worker", 8).begin(3, restored=6, cause="worker-lost")
    late = {**next(event for event in run.events if event["step"] == 7), "loss": 55.0}
    run.events.append(late)
    assert judged(read_history(run.train(STEPS).end())).is_same
