"""Draws a drill: both losses, their difference on a logarithmic axis, and where the faults struck.

matplotlib is imported here alone, when a picture is wanted; without it a drill has no picture and all the rest.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from orchestrator.drill_compare import Comparison
from orchestrator.drill_history import History
from orchestrator.drill_rules import LOSS, Measure
from orchestrator.event_fields import float_of

__all__ = ["draw"]

_SIZE_INCHES = (9.0, 6.0)
_DOTS_PER_INCH = 110
_FLOOR = 1e-17  # where losses are equal to the bit: a logarithm has no zero


def draw(path: Path, unbroken: History, interrupted: History, comparison: Comparison) -> str:
    """Write the picture; its path, or why there is none: the verdict of a drill does not depend on one."""
    try:
        _draw(unbroken, interrupted, comparison).savefig(path)
    except ImportError as error:
        return f"none: {error} (pip install matplotlib)"
    except Exception as error:  # noqa: BLE001 - drawing is another's code, and two runs are done whose result is due
        return f"none: {type(error).__name__}: {error}"
    return str(path)


def _draw(unbroken: History, interrupted: History, comparison: Comparison) -> Any:
    """A matplotlib Figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for history, name, style in ((unbroken, "uninterrupted", "-"), (interrupted, "interrupted", "--")):
        steps = sorted(history.steps)
        upper.plot(steps, [float_of(history.steps[step], LOSS.field) for step in steps], style, label=name)
    _draw_difference(lower, unbroken, interrupted, comparison)
    verbs: dict[int, list[str]] = {}
    for strike in interrupted.strikes:
        verbs.setdefault(strike.at_step, []).append(strike.verb)
    for axis in (upper, lower):
        for step in verbs:
            axis.axvline(step, color="0.7", linewidth=0.8, zorder=0)
        if comparison.first:
            axis.axvline(comparison.first[0].step, color="tab:red", linewidth=1.0)
    for step, names in verbs.items():
        # Above the axes, where no curve runs; the layout leaves them the room that they need.
        place = {"xycoords": ("data", "axes fraction"), "rotation": 45, "ha": "left", "va": "bottom"}
        upper.annotate(", ".join(names), (step, 1.01), fontsize=7, color="0.4", annotation_clip=False, **place)
    upper.set_ylabel("loss")
    figure.legend(loc="outside lower center", ncols=2)
    lower.set_xlabel("step")
    return figure


def _draw_difference(axis: Any, unbroken: History, interrupted: History, comparison: Comparison) -> None:
    steps = sorted(unbroken.steps.keys() & interrupted.steps.keys())
    sizes = [_relative(float_of(unbroken.steps[step], LOSS.field), float_of(interrupted.steps[step], LOSS.field))
             for step in steps]  # fmt: skip
    axis.semilogy(steps, [max(size, _FLOOR) for size in sizes], ".", markersize=3)
    rule = comparison.rules[LOSS]
    if rule.measure is Measure.RELATIVE:
        axis.axhline(rule.tolerance, color="tab:red", linewidth=0.8, linestyle=":")
    axis.set_ylim(_FLOOR / 3, max(1e-3, *sizes, 1e-3) * 3)
    axis.set_ylabel("relative difference")
    if steps and not any(sizes):
        axis.set_title("all losses are equal to the bit", fontsize=9)


def _relative(here: float, there: float) -> float:
    apart = abs(there - here)
    if not math.isfinite(apart):
        return 1.0
    return apart / abs(here) if here else float(apart > 0)
