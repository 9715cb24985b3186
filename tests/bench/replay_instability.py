"""Replays recorded loss curves through the instability policy: where would each formula have saved, and where in vain?

A curve is a run's ``events.jsonl``, or a JSON file with ``reports``: a list of ``step``, ``loss``, ``grad_norm`` and,
where it was measured, ``grad_variance``. A file may name its unstable phase itself (``onset``, ``end``); for the others
it is given. Nothing is trained here, and no time is looked at: a save lands two steps after it was asked for.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from orchestrator.instability_policy import InstabilityPolicy
from orchestrator.save_config import InstabilityConfig
from orchestrator.save_facts import SaveFacts, TrainingFacts
from orchestrator.training_signals import TrainingSignals
from workers.contract import StepReport

__all__ = ["Curve", "Replay", "Tally", "read_curve", "replay", "tally"]

Formula = Literal["published", "corrected"]

_BIND_AHEAD = 2
_IN_TIME_STEPS = 20
_AFTERMATH_STEPS = 50
"""So long after an unstable phase its steps are neither quiet nor unstable: the loss comes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Steps of one run in order; ``onset`` to ``end`` (exclusive) were unstable, both None: none of them."""

    name: str
    reports: tuple[StepReport, ...]
    onset: int | None = None
    end: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """``asked``: evaluations whose score was above the threshold; ``saves``: steps that would have been saved."""

    curve: Curve
    evaluations: tuple[TrainingFacts, ...]
    asked: tuple[int, ...]
    saves: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Tally:
    """Over several replays. ``delays``: of each that was answered in time, from onset to the first save asked for."""

    quiet_evaluations: int = 0
    false_triggers: int = 0
    quiet_steps: int = 0
    quiet_saves: int = 0
    unstable_steps: int = 0
    unstable_saves: int = 0
    phases: int = 0
    delays: list[int] = field(default_factory=list)
    spacings: list[int] = field(default_factory=list)

    @property
    def false_rate(self) -> float:
        return self.false_triggers / max(1, self.quiet_evaluations)

    @property
    def miss_rate(self) -> float:
        return 1.0 - len(self.delays) / self.phases if self.phases else 0.0

    @property
    def density_ratio(self) -> float:
        """How many times denser the saves are in an unstable phase; infinite where quiet steps have none."""
        unstable = self.unstable_saves / max(1, self.unstable_steps)
        quiet = self.quiet_saves / max(1, self.quiet_steps)
        return unstable / quiet if quiet else math.inf if unstable else 0.0


def read_curve(path: Path, onset: int | None = None, end: int | None = None) -> Curve:
    """From either form of file. Of a step that was trained twice the newer one counts."""
    if path.suffix == ".jsonl":
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        told: dict[str, Any] = {"reports": [line for line in lines if line.get("event") == "step"]}
    else:
        told = json.loads(path.read_text())
    by_step = {int(row["step"]): _report(row) for row in told["reports"]}
    if not by_step:
        raise ValueError(f"{path}: no step in it; expected events of the name step, or a list of reports")
    return Curve(
        name=path.stem,
        reports=tuple(by_step[step] for step in sorted(by_step)),
        onset=told.get("onset", onset),
        end=told.get("end", end),
    )


def _report(row: dict[str, Any]) -> StepReport:
    variance = row.get("grad_variance")
    return StepReport(
        step=int(row["step"]),
        loss=float(row["loss"]),
        grad_norm=float(row["grad_norm"]),
        lr=float(row.get("lr", 0.0)),
        tokens=0,
        position=0,
        sample_chain="",
        step_s=float(row.get("step_s", 1.0)),
        finished_at_s=0.0,
        grad_variance=None if variance is None else float(variance),
    )


def replay(curve: Curve, config: InstabilityConfig, *, every_steps: int = 10, offset: float = 0.0) -> Replay:
    """As the coordinator asks: after every step, with the newest evaluation."""
    signals = TrainingSignals(every_steps, config.quantile, window=config.window, lag=config.lag)
    policy, newest = InstabilityPolicy(config), None
    evaluations: list[TrainingFacts] = []
    asked: list[int] = []
    saves: list[int] = []
    for report in curve.reports:
        facts = signals.add(report)
        if facts is not None:
            evaluations.append(facts)
            newest = facts
            alone = _facts(report.step, curve, facts, (), offset)
            asked += [report.step] if policy.opinion(alone).due_at_s is not None else []
        if policy.opinion(_facts(report.step, curve, newest, saves, offset)).due_at_s is not None:
            saves.append(report.step + _BIND_AHEAD)
    return Replay(curve=curve, evaluations=tuple(evaluations), asked=tuple(asked), saves=tuple(saves))


def _facts(step: int, curve: Curve, training: TrainingFacts | None, saves: Sequence[int], offset: float) -> SaveFacts:
    return SaveFacts(
        now_s=float(step),
        newest_step=step,
        total_steps=curve.reports[-1].step,
        unsettled=0,
        last_save_step=saves[-1] if saves else 0,
        last_save_at_s=0.0,
        durable_step=0,
        durable_at_s=0.0,
        nearest_step=0,
        nearest_at_s=0.0,
        training=training,
        threshold_offset=offset,
        last_instability_step=saves[-1] if saves else None,
    )


def tally(replays: Sequence[Replay], *, from_step: int = 0) -> Tally:
    """Count what came of the curves from ``from_step`` on."""
    total = Tally()
    for each in replays:
        curve = each.curve
        onset, end = curve.onset, curve.end
        steps = [report.step for report in curve.reports if report.step >= from_step]
        evaluated = [facts.step for facts in each.evaluations if facts.step >= from_step]
        quiet = {step for step in steps if onset is None or end is None or not onset <= step < end + _AFTERMATH_STEPS}
        total.quiet_steps += len(quiet)
        total.quiet_evaluations += len(quiet.intersection(evaluated))
        total.false_triggers += len(quiet.intersection(each.asked))
        total.quiet_saves += sum(step - _BIND_AHEAD in quiet for step in each.saves)
        total.spacings += [later - sooner for sooner, later in zip(each.saves, each.saves[1:], strict=False)]
        if onset is None or end is None or onset > curve.reports[-1].step:
            continue
        total.phases += 1
        total.unstable_steps += end - onset
        within = [step - _BIND_AHEAD for step in each.saves if onset <= step - _BIND_AHEAD < end]
        total.unstable_saves += len(within)
        total.delays += [within[0] - onset] if within and within[0] - onset <= _IN_TIME_STEPS else []
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("curves", nargs="+", type=Path)
    parser.add_argument("--onset", type=int, help="first step of the unstable phase, where a file does not say it")
    parser.add_argument("--end", type=int, help="first step after it")
    parser.add_argument("--from-step", type=int, default=100, help="what came before is left out of the counts")
    parser.add_argument("--every-steps", type=int, default=10)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of policy.instability")
    arguments = parser.parse_args()
    curves = [read_curve(path, arguments.onset, arguments.end) for path in arguments.curves]
    settings = dict(text.split("=", 1) for text in arguments.set)
    print("formula     false triggers        missed   delay (median)  saves/1000: quiet  unstable  ratio  spacing")
    for formula in get_args(Formula):
        config = InstabilityConfig.model_validate(settings | {"formula": formula})
        replays = [replay(curve, config, every_steps=arguments.every_steps) for curve in curves]
        print(_line(formula, tally(replays, from_step=arguments.from_step)))


def _line(formula: str, total: Tally) -> str:
    delay = "-" if not total.delays else f"{sorted(total.delays)[len(total.delays) // 2]}"
    spacing = "-" if not total.spacings else f"{min(total.spacings)}..{max(total.spacings)}"
    quiet = 1000 * total.quiet_saves / max(1, total.quiet_steps)
    unstable = 1000 * total.unstable_saves / max(1, total.unstable_steps)
    return (
        f"{formula:10} {total.false_triggers:4d}/{total.quiet_evaluations:<4d} {total.false_rate:6.1%}  "
        f"{total.phases - len(total.delays):3d}/{total.phases:<3d} {total.miss_rate:5.0%}  {delay:>14} "
        f"{quiet:18.1f} {unstable:9.1f} {total.density_ratio:6.1f}  {spacing}"
    )


if __name__ == "__main__":
    main()
