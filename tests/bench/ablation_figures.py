"""What one run of the ablation cost and saved: figures out of its events. Pure; draws no conclusions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from orchestrator.save_summary import policy_of, stored_bytes_of
from tests.bench.unstable_runs import IN_TIME_STEPS, Course, asked_by_instability
from tests.runs import Event
from workers.order_plan import BIND_AHEAD

__all__ = ["Figures", "figures_of"]

_EVALUATE_EVERY = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one run, or summed over several (the shares then anew). Steps that were run again count each time.

    ``trained_s``: of all steps; ``slowdown_s``: of the steps beside a save, against the median of the others; may be
    below 0. ``at_risk_steps``: over all steps, how many a fault would have taken when that step was finished.
    ``unstable_saves`` and ``quiet_saves``: saves of every policy, by the step they were asked for; the rest
    fell into the steps just after a window. ``false_triggers``: instability saves asked for in quiet steps.
    """

    lost_steps: int
    lost_s: float
    recovery_s: float
    total_s: float
    saves: int
    stored_bytes: int
    stall_s: float
    slowdown_s: float
    trained_s: float
    at_risk_steps: int
    steps: int
    unstable_steps: int
    unstable_saves: int
    quiet_steps: int
    quiet_saves: int
    false_triggers: int
    quiet_evaluations: int
    missed: int
    windows: int
    spacings: tuple[int, ...]

    @property
    def cost_share(self) -> float:
        return (self.stall_s + max(0.0, self.slowdown_s)) / self.trained_s

    @property
    def mean_at_risk_steps(self) -> float:
        """What a fault costs in the mean, wherever it falls: the faults of a few runs are too few to tell."""
        return self.at_risk_steps / max(1, self.steps)

    @property
    def false_rate(self) -> float:
        return self.false_triggers / max(1, self.quiet_evaluations)

    @property
    def miss_rate(self) -> float:
        return self.missed / max(1, self.windows)

    @property
    def density_ratio(self) -> float:
        """How many times denser the saves are in unstable steps than in quiet ones; infinite: quiet ones have none."""
        unstable = self.unstable_saves / max(1, self.unstable_steps)
        quiet = self.quiet_saves / max(1, self.quiet_steps)
        return unstable / quiet if quiet else float("inf") if unstable else 0.0


def figures_of(events: Sequence[Event], summary: Mapping[str, object], course: Course) -> Figures:
    """Of a run that finished; ``summary`` is its summary.json."""
    steps = [event for event in events if event["event"] == "step"]
    saves = [event for event in events if event["event"] == "save_bound" and event["kind"] != "part"]
    commits = [event for event in events if event["event"] == "committed"]
    asked = [event["step"] - BIND_AHEAD for event in saves if event["step"] != course.steps]  # that one comes anyway
    triggers = asked_by_instability(events)
    goodput = summary["goodput"]
    assert isinstance(goodput, Mapping)
    return Figures(
        lost_steps=sum(event["lost_steps"] for event in events if event["event"] == "attempt_started"),
        lost_s=float(goodput["lost_work_s"]),
        recovery_s=float(goodput["recovery_s"]),
        total_s=float(goodput["total_s"]),
        saves=len(saves),
        stored_bytes=sum(stored_bytes_of(event) for event in commits),
        stall_s=sum(event["stall_s"] for event in commits),
        slowdown_s=_slowdown_s(steps, saves, commits),
        trained_s=sum(event["step_s"] for event in steps),
        at_risk_steps=_at_risk_steps(events),
        steps=len(steps),
        unstable_steps=_count(course.is_unstable(event["step"]) for event in steps),
        unstable_saves=_count(course.is_unstable(step) for step in asked),
        quiet_steps=_count(course.is_quiet(event["step"]) for event in steps),
        quiet_saves=_count(course.is_quiet(step) for step in asked),
        false_triggers=_count(course.is_quiet(step) for step in triggers),
        quiet_evaluations=_count(
            course.is_quiet(event["step"]) and not event["step"] % _EVALUATE_EVERY for event in steps
        ),
        missed=_count(
            not any(first <= step <= first + IN_TIME_STEPS for step in triggers) for first, _ in course.windows
        ),
        windows=len(course.windows),
        spacings=_spacings(saves),
    )


def _count(facts: Iterable[bool]) -> int:
    return sum(facts)


def _spacings(saves: Sequence[Event]) -> tuple[int, ...]:
    """Between saves of one Attempt that a policy or the cadence asked for."""
    ordered = [event for event in saves if policy_of(event["reason"], event["kind"]) not in ("order", "leave")]
    return tuple(two["step"] - one["step"] for one, two in pairwise(ordered) if one["attempt"] == two["attempt"])


def _at_risk_steps(events: Sequence[Event]) -> int:
    """Lines of steps stand a step behind; all the same for every contestant."""
    durable = at_risk = 0
    for event in events:
        match event["event"]:
            case "attempt_started":
                durable = event["restored_step"]
            case "committed":
                durable = max(durable, event["step"])
            case "step":
                at_risk += max(0, event["step"] - durable)
    return at_risk


def _slowdown_s(steps: Sequence[Event], saves: Sequence[Event], commits: Sequence[Event]) -> float:
    """Over the steps that ran while a save was being written. The first of each Attempt is left out: it compiles."""
    written_s = {(event["attempt"], event["step"]): event["t_s"] for event in commits}
    finished_s = {(event["attempt"], event["step"]): event["finished_s"] for event in steps}
    busy = [
        (finished_s[key], written_s[key])
        for key in {(event["attempt"], event["step"]) for event in saves}
        if key in written_s and key in finished_s
    ]
    first = {attempt: min(step for other, step in finished_s if other == attempt) for attempt, _ in finished_s}
    beside: list[float] = []
    alone: list[float] = []
    for event in steps:
        if event["step"] == first[event["attempt"]]:
            continue
        began_s = event["finished_s"] - event["step_s"]
        is_beside = any(began_s < written and event["finished_s"] > finished for finished, written in busy)
        (beside if is_beside else alone).append(event["step_s"])
    if not alone:
        return 0.0
    usual_s = statistics.median(alone)
    return sum(step_s - usual_s for step_s in beside)
