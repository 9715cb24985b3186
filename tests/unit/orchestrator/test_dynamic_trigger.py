"""The save policies behind the trigger of a loop without a coordinator; time is the test's."""

from __future__ import annotations

from itertools import pairwise

from orchestrator.dynamic_trigger import DynamicTrigger
from orchestrator.save_config import HazardConfig, SavePolicyConfig
from workers.save_trigger import SaveOver, StepFacts


class Training:
    """Steps of one second; a save takes ``write_s`` and costs ``stall_s``."""

    def __init__(self, policy: SavePolicyConfig, state: dict[str, object] | None = None, base_step: int = 0) -> None:
        self.now_s = 0.0
        self.trigger = DynamicTrigger(policy, num_nodes=1, clock=lambda: self.now_s)
        if state is not None:
            self.trigger.load(state)  # type: ignore[arg-type]
        self.trigger.begin(base_step, 100_000, 1)
        self.step = base_step
        self.saves: dict[int, str] = {}

    def run(self, steps: int, *, stall_s: float = 1.0, metric: float | None = None) -> None:
        for _ in range(steps):
            self.now_s += 1.0
            self.step += 1
            self.trigger.take_step(StepFacts(step=self.step, step_s=1.0, loss=1.0, grad_norm=1.0, metric=metric))
            reason = self.trigger.due(self.step)
            if reason is not None:
                self.saves[self.step] = reason
                self.trigger.began(self.step)
                self.trigger.over(
                    SaveOver(step=self.step, stall_s=stall_s, write_s=2.0, raw_bytes=100, stored_bytes=80)
                )


def gaps(training: Training) -> list[int]:
    steps = sorted(training.saves)
    return [after - before for before, after in pairwise(steps)]


def test_the_work_at_risk_is_bounded_before_anything_broke() -> None:
    training = Training(SavePolicyConfig(max_at_risk_s=100.0))
    training.run(400)
    assert len(training.saves) >= 3
    assert max(gaps(training)) <= 100
    assert all(reason.startswith(("bounds:", "hazard:")) for reason in training.saves.values())


def test_a_training_that_breaks_often_saves_more_often_and_a_dear_save_less_often() -> None:
    policy = SavePolicyConfig(min_interval_s=0.0, max_at_risk_s=None, hazard=HazardConfig(first_interval_s=50.0))
    often = {"faults": 20, "preemptions": 0, "exposure_node_s": 2000.0, "is_planned_end": False}
    seldom = {"faults": 1, "preemptions": 0, "exposure_node_s": 2000.0, "is_planned_end": True}
    cheap, dear, calm = Training(policy, dict(often)), Training(policy, dict(often)), Training(policy, dict(seldom))
    cheap.run(500)
    dear.run(500, stall_s=8.0)
    calm.run(500)
    assert gaps(cheap)[-1] < gaps(dear)[-1]
    assert gaps(cheap)[-1] < gaps(calm)[-1]


def test_a_process_that_was_killed_counts_as_a_fault_and_one_that_was_told_to_stop_does_not() -> None:
    first = Training(SavePolicyConfig())
    first.run(10)
    killed = DynamicTrigger(num_nodes=1)
    killed.load(first.trigger.state(is_planned_end=False))
    told = DynamicTrigger(num_nodes=1)
    told.load(first.trigger.state(is_planned_end=True))
    assert (killed.state(is_planned_end=False)["faults"], killed.state(is_planned_end=False)["preemptions"]) == (1, 0)
    assert (told.state(is_planned_end=False)["faults"], told.state(is_planned_end=False)["preemptions"]) == (0, 1)
    assert killed.state(is_planned_end=False)["exposure_node_s"] >= 10.0  # type: ignore[operator]


def test_the_best_evaluation_is_saved_where_the_policy_is_named() -> None:
    training = Training(SavePolicyConfig(policies=("best-metric",), min_interval_s=0.0, max_at_risk_s=None))
    training.run(3)
    training.run(1, metric=0.5)
    training.run(2)
    training.run(1, metric=0.7)
    training.run(2)
    assert list(training.saves) == [4]
    assert training.saves[4].startswith("best-metric:")


def test_a_save_that_failed_is_asked_for_again() -> None:
    training = Training(SavePolicyConfig(min_interval_s=0.0, max_at_risk_s=20.0))
    training.run(10)
    training.now_s += 20.0
    training.trigger.take_step(StepFacts(step=11, step_s=1.0))
    assert training.trigger.due(11) is not None
    training.trigger.began(11)
    training.trigger.over(SaveOver(step=11, stall_s=0.1, write_s=1.0, raw_bytes=1, failure="gone"))
    training.step, before = 11, set(training.saves)
    training.run(60)
    assert set(training.saves) - before
