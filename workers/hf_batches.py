"""Micro-batches that Trainer has fetched and not computed yet, as a part of this rank's state.

Trainer reads ahead of its step. A collator or dataset that draws random numbers has drawn for those batches already, so
after a resume they are handed out as they were instead of being drawn anew. Only what the training process itself
collates is seen: loader processes draw from generators of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset

__all__ = ["FetchedBatches"]


class FetchedBatches:
    """A tracker of one rank. ``attach`` puts it round the collator of a Trainer's training batches."""

    def __init__(self) -> None:
        self._fetched: deque[Any] = deque()
        self._again: deque[Any] = deque()
        self._call: Callable[[], None] = _do_nothing
        self._trainer: Any = None

    def attach(self, trainer: Any) -> None:
        """Until `detach`. A stream of samples is left alone: it is read from its beginning after a resume."""
        self._trainer, self._call = trainer, _do_nothing
        make = trainer.get_train_dataloader

        def get_train_dataloader() -> Any:
            loader = make()
            inner = getattr(loader, "base_dataloader", loader)
            if not isinstance(inner.dataset, IterableDataset) and inner.num_workers == 0:
                inner.collate_fn = self._around(inner.collate_fn)
            return loader

        trainer.get_train_dataloader = get_train_dataloader

    def detach(self) -> None:
        if self._trainer is not None:
            vars(self._trainer).pop("get_train_dataloader", None)
            self._trainer = None

    def begin_epoch(self) -> None:
        self._fetched.clear()

    def computed(self) -> None:
        """The oldest of them went through forward and backward."""
        if self._fetched:
            self._fetched.popleft()

    def state_dict(self) -> dict[str, Any]:
        if not all(_is_storable(batch) for batch in self._fetched):
            return {"batches": []}
        return {"batches": [dict(batch) for batch in self._fetched]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._fetched.clear()
        self._again = deque(state_dict["batches"])

    def when_handed_out(self, call: Callable[[], None]) -> None:
        """``call`` once when the last restored batch is given out, before anything new is drawn; never if there is
        none."""
        self._call = call

    def _around(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def collated(samples: Any) -> Any:
            if not self._again:
                batch = collate(samples)
            else:
                batch = self._again.popleft()
                if not self._again:
                    self._call()
            self._fetched.append(batch)
            return batch

        return collated


def _do_nothing() -> None: ...


def _is_storable(batch: Any) -> bool:
    """Tensors by name, as nearly all collators give them."""
    return isinstance(batch, Mapping) and all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in batch.items()
    )
