"""Step lines that a contestant writes (one JSON object a finished step), and what is read from them after a kill."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Kill", "first_after", "read_steps", "wait_for_step"]

_LOOK_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Kill:
    """``seconds``: from the kill to the end of the first step of the smaller world. ``lost_steps``: finished steps that
    were done again. ``step_s``: the median step before the kill."""

    seconds: float
    lost_steps: int
    step_s: float


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Every whole line so far."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _nothing() -> None:
    """Nobody has to be asked for the lines."""


def wait_for_step(path: Path, step: int, timeout_s: float, look: Callable[[], None] = _nothing) -> None:
    """Until ``step`` is finished; ``look`` brings new lines in. Raises TimeoutError."""
    until = time.monotonic() + timeout_s
    look()
    while not any(line["step"] >= step for line in read_steps(path)):
        if time.monotonic() > until:
            raise TimeoutError(f"{path.name}: step {step} was not reached within {timeout_s:g} s")
        time.sleep(_LOOK_S)
        look()


def first_after(
    path: Path, killed_at_s: float, timeout_s: float, *, world_size: int, look: Callable[[], None] = _nothing
) -> Kill:
    """The first step that ended after ``killed_at_s`` (Unix time) in a world of ``world_size``. Raises TimeoutError."""
    until = time.monotonic() + timeout_s
    while True:
        look()
        lines = read_steps(path)
        after = [line for line in lines if line["at_s"] > killed_at_s and line["world_size"] == world_size]
        if after:
            before = [line for line in lines if line["at_s"] <= after[0]["at_s"] and line is not after[0]]
            times = sorted(line["step_s"] for line in before)
            lost = max(0, max(line["step"] for line in before) - after[0]["step"] + 1)
            return Kill(seconds=after[0]["at_s"] - killed_at_s, lost_steps=lost, step_s=times[len(times) // 2])
        if time.monotonic() > until:
            raise TimeoutError(f"{path.name}: no step of {world_size} within {timeout_s:g} s of the kill")
        time.sleep(_LOOK_S)
