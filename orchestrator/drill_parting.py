"""Tells where the two runs of a drill part first, what came before, and what to look at next. Pure."""

from __future__ import annotations

from orchestrator.drill_compare import Comparison
from orchestrator.drill_history import History
from orchestrator.drill_rules import Measure

__all__ = ["hints", "parting_lines"]


def parting_lines(comparison: Comparison, interrupted: History, *, reproducible: bool) -> list[str]:
    """The first difference; there must be one."""
    step = comparison.first[0].step
    lines = [f"FIRST DIFFERENCE at step {step}"]
    for difference in comparison.first:
        measure = comparison.rules[difference.quantity].measure
        way = "absolute" if measure is Measure.ABSOLUTE else "relative"
        size = "" if difference.size is None else f", a difference of {difference.size:.2e} {way}"
        values = f"{_value(difference.unbroken)} uninterrupted, {_value(difference.interrupted)} interrupted"
        lines.append(f"  {difference.quantity.name}: {values}{size}")
    lines += _what_came_before(comparison, interrupted, step)
    return lines + [f"  CHECK  {hint}" for hint in hints(comparison, reproducible=reproducible)]


def _what_came_before(comparison: Comparison, interrupted: History, step: int) -> list[str]:
    strike, attempt = comparison.last_strike, interrupted.attempt_of(step)
    lines = ["  no fault had struck before it" if strike is None else f"  the last fault before it: {strike}"]
    if attempt is None or not attempt["restored_step"]:
        return lines
    if strike is not None and step <= strike.at_step:
        lines[0] += f"; the run then went back to step {attempt['restored_step']}, and step {step} was made again"
    lines.append(
        f"  the step was made by attempt {attempt['attempt']} ({attempt['cause']}), which went on from step "
        f"{attempt['restored_step']} ({attempt['restored_from']})"
    )
    return lines


def hints(comparison: Comparison, *, reproducible: bool) -> tuple[str, ...]:
    """The commonest causes of such a difference, each with what to do; none where nothing differs."""
    if not comparison.first:
        return ()
    step, differs_at = comparison.first[0].step, comparison.sizes_differ_at
    if comparison.last_strike is None:
        return (
            "nothing had struck yet, so two runs in peace would part as well: something is not seeded, or follows the "
            "clock, the machine or the order of files",
        )
    found = []
    if not reproducible and differs_at is not None and step >= differs_at:
        found.append(
            "all was equal as long as the numbers of workers were. With dropout, or whatever else draws random numbers "
            "in a step, other ones are drawn from there on: drill again with reproducible=true, which draws the same"
        )
    found.append(
        "what a loop or model keeps outside of its state (in a module, a class, a local variable) is new in a fresh "
        "process, and not rolled back in one that lives on: give it to make_trackers (docs/user-loops.md)"
    )
    return tuple(found)


def _value(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)
