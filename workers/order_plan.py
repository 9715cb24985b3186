"""Which step carries out which Order: bound by rank 0, learned by all ranks from the step vector.

Pure but for the clock that rank 0's side is given. At the end of step s rank 0 decides about step s + 2 alone, so one
slot of the vector is enough, a later Order can still replace an earlier one that waits, and every rank has read the
slot before step s + 2 ends. Steps that lie too close to the start of an Attempt for that follow a standing rule that
every rank works out by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from workers.contract import BoundOrder, Order, OrderKind

__all__ = ["BIND_AHEAD", "CADENCE", "Binding", "OrderBinder", "OrderPlan", "standing_orders"]

BIND_AHEAD = 2
CADENCE = 0
"""The Order number of saves that no Order asked for: the fixed cadence and the last step."""
_MAX_UNSETTLED = 2
_MAX_PASSED_OVER, _PATIENCE_S = 3, 60.0
"""Due saves in a row, and the time since a save was last bound. That a rank other than 0 has not taken a save shows by
its Receipt for a later one: where no save under way can become whole, as after the death of a Keeper, only another one
ends them."""


def standing_orders(*, base_step: int, total_steps: int, every_steps: int | None) -> tuple[BoundOrder, ...]:
    """Saves at the first steps of an Attempt, which rank 0 cannot bind in time, and at the last step if it is there."""
    first = range(base_step + 1, min(base_step + BIND_AHEAD, total_steps) + 1)
    return tuple(
        BoundOrder(number=CADENCE, kind=OrderKind.SNAPSHOT, step=step)
        for step in first
        if step == total_steps or (every_steps is not None and step % every_steps == 0)
    )


class OrderPlan:
    """Every rank's view: what is carried out at the end of which step. Equal on all ranks."""

    def __init__(self, *, total_steps: int, standing: Iterable[BoundOrder] = ()) -> None:
        self._total_steps = total_steps
        self._by_step = {order.step: order for order in standing}
        self.is_ending = False
        """Whether an Order that ends the Attempt has been learned."""

    def learn(self, order: BoundOrder) -> None:
        """Take in what a step vector said; kind NONE says nothing."""
        if order.kind is not OrderKind.NONE:
            self._by_step[order.step] = order
            self.is_ending = self.is_ending or order.kind.ends_attempt

    def due(self, step: int) -> BoundOrder | None:
        """What must be done at the end of ``step``; given out once. The last step always saves, and is not left."""
        order = self._by_step.pop(step, None)
        if step != self._total_steps:
            return order
        number, kind = (CADENCE, OrderKind.SNAPSHOT) if order is None else (order.number, _at_last_step(order.kind))
        return BoundOrder(number=number, kind=kind, step=step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What rank 0 puts into the vector, and a step of the cadence it had to pass over."""

    bound: BoundOrder | None = None
    skipped_step: int | None = None


class OrderBinder:
    """Rank 0's side: gives the newest Order, the cadence and the last step their steps, and keeps saves from piling up.

    Saves of the cadence are passed over while two saves are neither committed nor given up, but not for ever; Orders
    and the last step are not, since their issuer knows what is under way. How many may be under way in the end is the
    coordinator's to bound, and each rank's buffers'.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        every_steps: int | None,
        standing: Iterable[BoundOrder] = (),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps, self._every_steps = total_steps, every_steps
        self._monotonic = monotonic
        self._bound_at_s = monotonic()
        self._unsettled = {order.step for order in standing}
        self._last_number = CADENCE
        self._num_passed_over = 0
        self._is_leaving = False

    def settle(self, steps: Iterable[int]) -> None:
        """These saves are over, in one way or the other."""
        self._unsettled.difference_update(steps)

    def bind(self, step: int, order: Order | None) -> Binding:
        """The decision at the end of ``step`` about ``step + 2``. An Order beats the cadence."""
        target = step + BIND_AHEAD
        if self._is_leaving or target > self._total_steps:
            return Binding()
        is_due = order is not None and order.number > self._last_number and order.not_before_step <= target
        if order is not None and is_due and order.kind is not OrderKind.NONE:
            self._last_number = order.number
            self._is_leaving = order.kind.ends_attempt
            kind = _at_last_step(order.kind) if target == self._total_steps else order.kind
            return self._accept(BoundOrder(number=order.number, kind=kind, step=target))
        if target == self._total_steps:
            return self._accept(BoundOrder(number=CADENCE, kind=OrderKind.SNAPSHOT, step=target))
        if self._every_steps is None or target % self._every_steps:
            return Binding()
        if len(self._unsettled) >= _MAX_UNSETTLED and not self._is_patience_over():
            self._num_passed_over += 1
            return Binding(skipped_step=target)
        return self._accept(BoundOrder(number=CADENCE, kind=OrderKind.SNAPSHOT, step=target))

    def _is_patience_over(self) -> bool:
        is_long = self._monotonic() - self._bound_at_s >= _PATIENCE_S
        return is_long and self._num_passed_over >= _MAX_PASSED_OVER

    def _accept(self, order: BoundOrder) -> Binding:
        self._unsettled.add(order.step)
        self._num_passed_over, self._bound_at_s = 0, self._monotonic()
        return Binding(bound=order)


def _at_last_step(kind: OrderKind) -> OrderKind:
    """The last step is always saved and nobody leaves at it: whoever hears of this is to expect a Commit. A form that
    was chosen because time is short stays: the exact one may not be committed before its node is gone."""
    return kind if kind.is_bounded else OrderKind.SNAPSHOT
