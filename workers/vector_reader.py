"""Brings step vectors to the device and their sums back, so that the host waits for no kernel queued after a sum.

On a CUDA device a sum travels to pinned memory on a stream of its own: reading it waits for its arrival alone. On the
CPU it is read where it lies. When to read, and what the words mean, is `step_sums`' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["Reading", "VectorReader"]


class Waitable(Protocol):
    """A collective under way. ``wait`` holds up the current stream, and on the CPU the caller."""

    def wait(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Reading:
    """One sum on its way to the host. ``arrival``: on a CUDA device, after which ``arrived`` holds it."""

    vector: torch.Tensor
    work: Waitable
    arrived: torch.Tensor
    arrival: torch.cuda.Event | None

    def words(self) -> list[float]:
        """Wait for this sum, and for nothing that was begun after it."""
        if self.arrival is None:
            self.work.wait()
        else:
            self.arrival.synchronize()
        words: list[float] = self.arrived.tolist()
        return words


class VectorReader:
    """One rank's, of the training thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def upload(self, words: Sequence[float]) -> torch.Tensor:
        """``words`` in fp64 on the device. Only pinned memory leaves without the host possibly waiting for it."""
        vector = torch.tensor(words, dtype=torch.float64, pin_memory=self._side is not None)
        return vector.to(self._device, non_blocking=True)

    def begin(self, vector: torch.Tensor, work: Waitable) -> Reading:
        """At once after ``work``, which sums ``vector`` in place, was begun."""
        if self._side is None:
            return Reading(vector, work, vector, None)
        with torch.cuda.stream(self._side):
            work.wait()
            arrived = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            arrived.copy_(vector, non_blocking=True)
            vector.record_stream(self._side)  # a Reading that is dropped unread must not free it under the copy
            arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrival.record()
        return Reading(vector, work, arrived, arrival)
