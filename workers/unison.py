"""Lets the ranks of a loop without a coordinator decide alike: rank 0's word, and a stop that any rank may ask for.

One tiny all-reduce a step on a gloo group of its own, read one step later, so that no rank waits for another. Every
exchange has a limit in time. A single process needs no group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

__all__ = ["Ranks", "Word"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """``save_at``: a step whose Checkpoint is due, 0: none. ``stop``: some rank was told to end; ``give_up``: saves
    failed so often on some rank that none goes on."""

    save_at: int = 0
    stop: bool = False
    give_up: bool = False


class Ranks:
    """The ranks of this process's default group, or this process alone. Made on all ranks at the same place.

    ``saves``: a group for the collectives of saves alone, which run in a thread; None for a single process.
    """

    def __init__(self, timeout_s: float) -> None:
        is_many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if is_many else 0
        self.size = dist.get_world_size() if is_many else 1
        self._timeout = timedelta(seconds=timeout_s)
        self._words = dist.new_group(backend="gloo", timeout=self._timeout) if is_many else None
        self.saves = dist.new_group(backend="gloo", timeout=self._timeout) if is_many else None
        self._pending: tuple[torch.Tensor, Any] | None = None

    @property
    def lag(self) -> int:
        """How many steps after it was said a word is heard."""
        return 0 if self._words is None else 1

    def exchange(self, say: Callable[[], Word], act: Callable[[Word], None]) -> None:
        """Every rank, at the same place of each step: carry out what was said before, then say. Alone: at once."""
        if self._words is None:
            act(say())
            return
        act(self.heard())
        word = say()
        vector = torch.tensor([word.save_at, int(word.stop), int(word.give_up)], dtype=torch.int64)
        self._pending = vector, dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=self._words, async_op=True)

    def heard(self) -> Word:
        """What all ranks said at the last step, the same on each; taken once."""
        pending, self._pending = self._pending, None
        if pending is None:
            return Word()
        vector, work = pending
        work.wait(self._timeout)
        save_at, stop, give_up = vector.tolist()
        return Word(save_at=save_at, stop=bool(stop), give_up=bool(give_up))

    def from_first(self, make: Callable[[], T]) -> T:
        """What ``make`` gives on rank 0, on every rank; where it raises there, every rank raises."""
        if self._words is None:
            return make()
        box: list[Any] = [None]
        if self.rank == 0:
            try:
                box = [(make(), None)]
            except Exception as error:  # noqa: BLE001  handed to the others, and raised here below
                box = [(None, error)]
        dist.broadcast_object_list(box, src=0, group=self._words)
        made, failure = box[0]
        if failure is not None:
            raise failure
        value: T = made
        return value

    def gathered(self, value: T) -> list[T]:
        """``value`` of every rank, in rank order."""
        if self._words is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._words)
        return values
