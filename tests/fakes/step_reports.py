"""Step reports as rank 0 sends them, with what a test does not care about filled in."""

from __future__ import annotations

from typing import Any

from workers.contract import StepReport

__all__ = ["step_report"]


def step_report(step: int, **fields: Any) -> StepReport:
    """Of a step that took one second, whose loss is 5 and whose gradient has the norm 1."""
    defaults: dict[str, Any] = {
        "loss": 5.0,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": step,
        "position": step,
        "sample_chain": "0",
        "step_s": 1.0,
        "finished_at_s": float(step),
    }
    return StepReport(step=step, **(defaults | fields))
