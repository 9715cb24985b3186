"""Whether an evaluation must end before its last leaf, as an Order waits that ends the Attempt. The same on all ranks.

Rank 0 alone hears of Orders. Its word rides in a sum of one number a leaf, read one leaf later, when it has long
arrived; only the first of an evaluation is waited for. It binds no Order and ends nothing itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from workers.order_desk import OrderDesk

__all__ = ["Yielding"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A sum that is under way. ``arrival``: on a CUDA device, after which ``word`` holds it."""

    word: torch.Tensor
    work: dist.Work
    arrival: torch.cuda.Event | None

    def read(self) -> bool:
        if self.arrival is None:
            self.work.wait()
        else:
            self.arrival.synchronize()
        return bool(self.word.item())


class Yielding:
    """One Attempt's, of the training thread. Collective: every rank asks equally often."""

    def __init__(
        self,
        device: torch.device,
        *,
        start_sum: Callable[[torch.Tensor], dist.Work],
        desk: Callable[[], OrderDesk],
    ) -> None:
        self._device, self._start_sum, self._desk = device, start_sum, desk
        self._asked: _Asked | None = None
        self._step = -1
        self._is_known = False

    def must_stop(self, step: int) -> bool:
        """Asked before each leaf of an evaluation at the end of ``step``. Once True it stays so."""
        desk = self._desk()
        self._is_known = self._is_known or desk.is_ending
        if self._is_known:
            return True
        asked, self._asked = self._asked, None
        if asked is not None and asked.read():
            self._is_known = True
            return True
        now = self._ask(desk.waits_to_end(step))
        if step == self._step:
            self._asked = now
        else:
            self._step, self._is_known = step, now.read()
        return self._is_known

    def close(self) -> None:
        """Let go of the sum that nobody has read: it holds its group, and so the connections that others wait on."""
        self._asked = None

    def say_cut_short(self, step: int) -> None:
        _log.info("the evaluation of step %d was cut short and does not count: an Order ends this Attempt", step)

    def _ask(self, is_raised: bool) -> _Asked:
        word = torch.full((), float(is_raised), dtype=torch.float64, device=self._device)
        work = self._start_sum(word)
        if self._device.type != "cuda":
            return _Asked(word, work, None)
        work.wait()  # orders the stream; the host goes on
        arrived = torch.empty((), dtype=torch.float64, pin_memory=True)
        arrived.copy_(word, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return _Asked(arrived, work, event)
