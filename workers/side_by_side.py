"""What a Checkpoint says beside what the living objects hold after the load. Any difference ends the resume.

The saved side is read straight from the Manifest and the restored one from the objects that training uses, so that a
loader that forgets one, or fills a copy, is seen. Weights are `proof`'s to compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from pydantic import JsonValue

from storage.errors import ManifestMismatch
from workers.contract import FieldPair
from workers.loss_scaling import is_in_use
from workers.names import optimizer_names
from workers.plain_state import from_plain
from workers.state import TrainingState

__all__ = ["ResumeDiffers", "Saved", "differences", "side_by_side", "table"]

_PROGRESS = ("epoch", "tokens", "sample_chain")


class ResumeDiffers(ManifestMismatch):
    """A part of the restored state is not what its Checkpoint says, or the Checkpoint contradicts itself."""

    def __init__(self, step: int, fields: tuple[str, ...]) -> None:
        super().__init__(step, reshaped=fields)
        self.args = (step, fields)
        self.fields = fields

    def __str__(self) -> str:
        return (
            f"checkpoint of step {self.step}: what was restored is not what was saved: {'; '.join(self.fields)}. "
            "Training on would not be the same run: resume from another step (run.resume), or find out which part of "
            "the program or of the Checkpoint is wrong"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The Checkpoint's word. ``is_built_in``: optimizer and schedule are ours, whose LR and counter go together."""

    step: int
    shared_state: Mapping[str, JsonValue]
    is_built_in: bool


def side_by_side(saved: Saved, state: TrainingState, *, position: int) -> tuple[FieldPair, ...]:
    """``position``: where the stream of samples stands."""
    return tuple(_pairs(saved, state, position))


def differences(pairs: Sequence[FieldPair]) -> tuple[str, ...]:
    return tuple(f"{pair.name} (saved {pair.saved}, restored {pair.restored})" for pair in pairs if not pair.is_equal)


def table(pairs: Sequence[FieldPair]) -> list[str]:
    """For people, one line a field."""
    rows = [("field", "saved", "restored"), *((pair.name, pair.saved, pair.restored) for pair in pairs)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    marks = ["", *("" if pair.is_equal else "   DIFFERS" for pair in pairs)]
    return [f"{line}{mark}" for line, mark in zip(lines, marks, strict=True)]


def _pairs(saved: Saved, state: TrainingState, position: int) -> Iterator[FieldPair]:
    progress = _section(saved.shared_state, "progress")
    yield _pair("step", saved.step, state.progress.step)
    for name in _PROGRESS:
        if name in progress:
            yield _pair(name, progress[name], getattr(state.progress, name))
    yield _pair("sample position", progress.get("position"), position)
    yield from _learning_rates(saved, state)
    scheduler = _section(saved.shared_state, "scheduler")
    if "last_epoch" in scheduler:
        yield _pair("scheduler.last_epoch", scheduler["last_epoch"], getattr(state.scheduler, "last_epoch", None))
    if saved.is_built_in:  # it moves on once a step
        yield _pair("step of the schedule", saved.step, getattr(state.scheduler, "last_epoch", None))
    yield from _scaler(saved, state)


def _learning_rates(saved: Saved, state: TrainingState) -> Iterator[FieldPair]:
    groups = cast("list[dict[str, Any]]", _section(saved.shared_state, "optimizer").get("groups") or [])
    scheduled = _section(saved.shared_state, "scheduler").get("_last_lr")
    group_of = {name: one for one in groups for name in one.get("names", ())}
    here = list(zip(state.optimizer.param_groups, optimizer_names(state.model, state.optimizer), strict=True))
    for number, (group, names) in enumerate(here):
        of_group = next((group_of[name] for name in names if name in group_of), None)
        if of_group is None:
            continue  # nothing was saved for it; a partial restore says so
        yield _pair(f"lr of group {number}", _plain(of_group["settings"].get("lr")), group.get("lr"))
        if saved.is_built_in and isinstance(scheduled, list) and len(scheduled) == len(here):
            yield _pair(f"scheduled lr of group {number}", _plain(scheduled[number]), group.get("lr"))


def _scaler(saved: Saved, state: TrainingState) -> Iterator[FieldPair]:
    there = _section(saved.shared_state, "scaler")
    if state.scaler is None or not is_in_use(state.scaler) or "scale" not in there:
        return
    here = state.scaler.state_dict()
    yield _pair("scaler.scale", _plain(there["scale"]), here.get("scale"))
    if "_growth_tracker" in there:
        yield _pair("scaler.growth_tracker", _plain(there["_growth_tracker"]), here.get("_growth_tracker"))


def _pair(name: str, saved: object, restored: object) -> FieldPair:
    texts = [_text(value) for value in (saved, restored)]
    return FieldPair(name=name, saved=texts[0], restored=texts[1])


def _text(value: object) -> str:
    """Exact: the shortest text of a float names that float alone, and not a number equals not a number."""
    if isinstance(value, torch.Tensor):
        value = value.item()
    if isinstance(value, bool | int | float):
        return repr(float(value)) if isinstance(value, float) else str(value)
    return "-" if value is None else str(value)


def _plain(value: JsonValue) -> object:
    return from_plain(value, {})


def _section(values: Mapping[str, JsonValue], name: str) -> dict[str, JsonValue]:
    value = values.get(name)
    return value if isinstance(value, dict) else {}
