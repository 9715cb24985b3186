"""The result of a drill as text for people and as plain values for drill.json. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pydantic import JsonValue

from orchestrator.drill_compare import Comparison, Difference
from orchestrator.drill_history import History, Strike
from orchestrator.drill_parting import hints, parting_lines
from orchestrator.drill_rules import LOSS, WEIGHTS, Quantity
from orchestrator.report_text import count
from orchestrator.summary import AttemptSummary, back_after_s

__all__ = ["DrillResult", "result_json", "result_text"]

_SHOWN_LOSSES = 8
_STORED = frozenset({"local-disk", "object-storage"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillResult:
    """All that is told. ``seconds``: by run. ``audit``: what the data audit could not prove.
    ``plot``: the picture's file, or why there is none."""

    name: str
    reproducible: bool
    faults: tuple[str, ...]
    unbroken: History
    interrupted: History
    comparison: Comparison
    exit_codes: dict[str, int]
    seconds: dict[str, float]
    audit: tuple[str, ...]
    plot: str
    folder: str

    @property
    def problems(self) -> tuple[str, ...]:
        ends = (f"the {name} run ended with exit code {code}" for name, code in self.exit_codes.items() if code)
        audit = (f"data audit: {found}" for found in self.audit)
        return (*ends, *self.comparison.problems, *audit)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was not tried although it might seem so; no reason to fail."""
        strikes, sizes = self.interrupted.strikes, _sizes(self.interrupted.attempts)
        sources = {attempt["restored_from"] for attempt in self.interrupted.recoveries}
        notes: list[str] = []
        grew = any(later > earlier for earlier, later in pairwise(sizes))
        if sizes and not grew and any(_asks_to_grow(strike, min(sizes)) for strike in strikes):
            notes.append(
                "the run never grew: its steps were over before a new worker had started; --steps gives it time"
            )
        notes += [
            f"{strike} changed nothing: so many trained already"
            for strike in strikes
            if self.interrupted.reach.size_at(strike.target.at_s) == _asked_workers(strike)
        ]
        if sources and not sources & _STORED:
            notes.append("every restore was from memory; checkpoint.memory.mode=off drills those from the store")
        return tuple(notes)

    @property
    def is_same(self) -> bool:
        return not self.comparison.first and not self.problems


def _asked_workers(strike: Strike) -> int | None:
    """A ``scale`` says first how many workers it asks for."""
    asked = strike.detail.split(" ")[0]
    return int(asked) if strike.verb == "scale" and asked.isdigit() else None


def _asks_to_grow(strike: Strike, least: int) -> bool:
    return strike.verb == "add-node" or (_asked_workers(strike) or 0) > least


def result_text(result: DrillResult) -> str:
    """Short enough for one screen, the verdict last."""
    comparison = result.comparison
    lines = [
        *_heading(result),
        "",
        *_recoveries(result.interrupted),
        "",
        *_losses(result),
        "",
        *_quantities(comparison),
        "",
    ]
    if comparison.world_differs_at is not None and comparison.rules[WEIGHTS].only_same_world:
        lines.append(_why_no_bits(comparison))
    if comparison.first:
        lines += parting_lines(comparison, result.interrupted, reproducible=result.reproducible)
    lines += [f"NOTE     {note}" for note in result.notes]
    lines += [f"PROBLEM  {problem}" for problem in result.problems]
    if not result.audit:
        lines.append("audit    each sample once an epoch and in order, by the ledger of the interrupted run")
    lines += [f"plot     {result.plot}", f"files    {result.folder}", "", _verdict(result)]
    return "\n".join(lines)


def _why_no_bits(comparison: Comparison) -> str:
    step = comparison.world_differs_at
    if step == comparison.sizes_differ_at:
        why = "the runs have different numbers of workers and sums are rounded in another order"
    else:
        why = "nobody knows how many workers the interrupted run had, for the events of that step died with a driver"
    return f"From step {step} on {why}: bits are not compared any more (reproducible: true promises them)."


def _heading(result: DrillResult) -> list[str]:
    seconds = ", ".join(f"{name} {spent:.0f} s" for name, spent in result.seconds.items())
    promise = "the same bits (reproducible)" if result.reproducible else "the same within rounding"
    return [
        f"Drill of {result.name}: {result.comparison.num_steps} steps twice, {seconds}",
        f"promised {promise}",
        f"faults   {', '.join(result.faults)}",
    ]


def _recoveries(history: History) -> list[str]:
    lines = [
        f"{count(len(history.recoveries), 'regroup')}, {count(history.num_rolled_back, 'step')} trained again, "
        f"workers {' > '.join(map(str, _sizes(history.attempts)))}"
    ]
    for attempt in history.recoveries:
        took = back_after_s(attempt)
        time = "" if took is None else f", {took:.1f} s"
        lines.append(
            f"  {attempt['cause']:16} {count(attempt['world_size'], 'worker')} from step {attempt['restored_step']} on "
            f"({attempt['restored_from']}), {attempt['lost_steps']} lost{time}"
        )
    return lines


def _sizes(attempts: Sequence[AttemptSummary]) -> list[int]:
    sizes: list[int] = []
    for attempt in attempts:
        if not sizes or sizes[-1] != attempt["world_size"]:
            sizes.append(attempt["world_size"])
    return sizes


def _losses(result: DrillResult) -> list[str]:
    """A few steps side by side, the first difference among them."""
    one, other = result.unbroken.steps, result.interrupted.steps
    steps = sorted(one.keys() & other.keys())
    if not steps:
        return ["no step is there to compare"]
    spread = {steps[round(index * (len(steps) - 1) / (_SHOWN_LOSSES - 1))] for index in range(_SHOWN_LOSSES)}
    spread |= {difference.step for difference in result.comparison.first}
    lines = [f"{'step':>6}  {'loss':>12}  {'interrupted':>12}  {'relative difference':>20}  workers"]
    for step in sorted(spread):
        here, there = (float(str(history[step].get(LOSS.field, math.nan))) for history in (one, other))
        apart = "0" if here == there else f"{abs(there - here) / abs(here) if here else math.inf:.2e}"
        workers = f"{result.unbroken.world_size(step)} / {result.interrupted.world_size(step)}"
        lines.append(f"{step:>6}  {here:>12.6f}  {there:>12.6f}  {apart:>20}  {workers}")
    return lines


def _quantities(comparison: Comparison) -> list[str]:
    lines = [f"{'quantity':26} {'differs':>9} {'of':>6}  {'largest':>9}  demanded"]
    for quantity, rule in comparison.rules.items():
        compared = comparison.num_compared.get(quantity, 0)
        if not compared:
            continue
        largest = comparison.largest.get(quantity)
        size = "" if largest is None or largest.size is None else f"{largest.size:.1e}"
        differing = comparison.num_differing.get(quantity, 0)
        lines.append(f"{quantity.name:26} {differing:>9} {compared:>6}  {size:>9}  {rule}")
    return lines


def _verdict(result: DrillResult) -> str:
    if result.is_same:
        what = "to the bit" if result.reproducible else "within what rounding explains"
        return f"SAME: the interrupted run is the uninterrupted one, {what}, {_where_same(result)}."
    if result.comparison.first:
        return f"NOT THE SAME: from step {result.comparison.first[0].step} on."
    return f"NOT PROVEN: {result.problems[0]}."


def _where_same(result: DrillResult) -> str:
    num_steps, num_untold = result.comparison.num_steps, len(result.unbroken.untold | result.interrupted.untold)
    if not num_untold:
        return f"at all {num_steps} steps"
    return f"at {num_steps - num_untold} of {num_steps} steps; the events of the others died with a driver"


def result_json(result: DrillResult) -> dict[str, JsonValue]:
    comparison = result.comparison
    strike = comparison.last_strike
    return {
        "name": result.name,
        "is_same": result.is_same,
        "verdict": _verdict(result),
        "reproducible": result.reproducible,
        "steps": comparison.num_steps,
        "faults": list(result.faults),
        "happened": [str(one) for one in result.interrupted.strikes],
        "exit_codes": dict(result.exit_codes),
        "seconds": {name: round(spent, 3) for name, spent in result.seconds.items()},
        "recoveries": [_recovery_json(attempt) for attempt in result.interrupted.recoveries],
        "steps_trained_again": result.interrupted.num_rolled_back,
        "steps_untold": len(result.interrupted.untold),
        "world_differs_at": comparison.world_differs_at,
        "quantities": {one.field: _quantity_json(comparison, one) for one in comparison.rules},
        "first_difference": [_difference_json(one) for one in comparison.first],
        "last_fault_before": None if strike is None else str(strike),
        "hints": list(hints(comparison, reproducible=result.reproducible)),
        "weights_digest": {"uninterrupted": result.unbroken.weights_digest,
                           "interrupted": result.interrupted.weights_digest},
        "audit": list(result.audit),
        "problems": list(result.problems),
        "notes": list(result.notes),
        "plot": result.plot,
        "folder": result.folder,
    }  # fmt: skip


def _recovery_json(attempt: AttemptSummary) -> JsonValue:
    return {
        "attempt": attempt["attempt"],
        "cause": attempt["cause"],
        "world_size": attempt["world_size"],
        "restored_step": attempt["restored_step"],
        "restored_from": attempt["restored_from"],
        "lost_steps": attempt["lost_steps"],
        "recovery_s": back_after_s(attempt),
    }


def _quantity_json(comparison: Comparison, quantity: Quantity) -> JsonValue:
    largest = comparison.largest.get(quantity)
    return {
        "demanded": str(comparison.rules[quantity]),
        "compared": comparison.num_compared.get(quantity, 0),
        "differing": comparison.num_differing.get(quantity, 0),
        "largest": None if largest is None else _difference_json(largest),
    }


def _difference_json(difference: Difference) -> dict[str, JsonValue]:
    return {
        "step": difference.step,
        "quantity": difference.quantity.field,
        "uninterrupted": _plain(difference.unbroken),
        "interrupted": _plain(difference.interrupted),
        "size": _plain(difference.size),
    }


def _plain(value: object) -> JsonValue:
    """JSON has no word for infinities."""
    if value is None or isinstance(value, bool | int | str):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)
