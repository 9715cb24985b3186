"""A learning rate schedule as a part of the training state: when it moves on, and its state as plain values.

Any torch scheduler whose state is plain can be stored. What is not (a function of the user's own inside it, as SWALR
has one) is refused by its path. Values are filled into the scheduler that the loop holds, in the types it has there.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from pydantic import JsonValue
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR

from workers.plain_state import from_plain, numbers, to_plain

__all__ = ["advance_schedule", "capture_schedule", "restore_schedule", "schedule_kind"]

_NAME: Final = "scheduler"
_COUNTED: Final = "__counted__"
# Where torch's schedulers keep one value for each param group, by its position.
_PER_GROUP: Final = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "swa_lrs"}
)


def advance_schedule(scheduler: LRScheduler, *, is_update_skipped: bool = False) -> None:
    """Once a step, whether its update was applied or not: the LR is a function of the step.

    ReduceLROnPlateau follows a metric that only the loop knows: the loop itself calls its ``step(metric)``.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        return
    with warnings.catch_warnings():
        if is_update_skipped:  # torch takes a first step without an update for an oversight
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        scheduler.step()


def schedule_kind(scheduler: LRScheduler) -> str:
    """Its class, with the classes inside it: a state of another kind is not loaded."""
    name = type(scheduler).__name__
    if not isinstance(scheduler, SequentialLR | ChainedScheduler):
        return name
    return f"{name}({', '.join(schedule_kind(one) for one in scheduler._schedulers)})"


def capture_schedule(scheduler: LRScheduler) -> JsonValue:
    """Its state as JSON. Raises NotPlain with the path of what cannot be stored."""
    return to_plain(_counted(numbers(scheduler.state_dict())), _NAME, None)


def restore_schedule(scheduler: LRScheduler, saved: JsonValue, order: Sequence[int | None]) -> None:
    """Fill ``scheduler`` from what `capture_schedule` gave. ``order``: which saved param group each of the present ones
    was, None for a new one, whose values stay as they are."""
    fresh = scheduler.state_dict()
    scheduler.load_state_dict(_as_here(_arranged(from_plain(saved, {}), fresh, order), fresh))


def _counted(value: Any) -> Any:
    """MultiStepLR counts its milestones by number, and JSON has only text for keys."""
    if isinstance(value, Counter):
        return {_COUNTED: [[key, count] for key, count in value.items()]}
    if isinstance(value, Mapping):
        return {key: _counted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_counted(item) for item in value]
    return value


def _arranged(saved: Any, fresh: Any, order: Sequence[int | None]) -> Any:
    """``saved`` with its lists of values by group in the order of the present groups."""
    if not isinstance(saved, dict) or not isinstance(fresh, dict):
        return saved
    arranged: dict[str, Any] = {}
    for key, value in saved.items():
        here = fresh.get(key)
        if key == "_schedulers" and isinstance(here, list):
            arranged[key] = [_arranged(one, own, order) for one, own in zip(value, here, strict=True)]
        elif key in _PER_GROUP and isinstance(value, list) and isinstance(here, list) and len(here) == len(order):
            arranged[key] = [
                own if index is None or index >= len(value) else value[index]
                for own, index in zip(here, order, strict=True)
            ]
        else:
            arranged[key] = value
    return arranged


def _as_here(value: Any, fresh: Any) -> Any:
    """``value`` in the types that the scheduler here has: a tensor where its LR is one, a Counter."""
    if isinstance(fresh, torch.Tensor) and isinstance(value, int | float):
        return torch.full_like(fresh, value)
    if isinstance(fresh, Counter) and isinstance(value, dict) and _COUNTED in value:
        return Counter(dict(value[_COUNTED]))
    if isinstance(fresh, Mapping) and isinstance(value, dict):
        return {key: _as_here(item, fresh.get(key)) for key, item in value.items()}
    if isinstance(fresh, list) and isinstance(value, list) and len(fresh) == len(value):
        return [_as_here(item, own) for item, own in zip(value, fresh, strict=True)]
    return value
