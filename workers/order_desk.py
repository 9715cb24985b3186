"""Orders and due saves of one rank's Attempt: what rank 0 binds, what every rank carries out, what was left out.

Joins the pure rules of `order_plan` with rank 0's courier. It takes no Snapshot itself.
"""

from __future__ import annotations

import logging

from workers.contract import BoundOrder
from workers.courier import Courier
from workers.order_plan import BIND_AHEAD, OrderBinder, OrderPlan, standing_orders

__all__ = ["OrderDesk"]

_log = logging.getLogger(__name__)


class OrderDesk:
    """Made once the base step is known. ``courier`` is rank 0's; the other ranks have none and bind nothing."""

    def __init__(self, *, base_step: int, total_steps: int, every_steps: int | None, courier: Courier | None) -> None:
        standing = standing_orders(base_step=base_step, total_steps=total_steps, every_steps=every_steps)
        self._plan = OrderPlan(total_steps=total_steps, standing=standing)
        self._binder = OrderBinder(total_steps=total_steps, every_steps=every_steps, standing=standing)
        self._courier = courier
        if courier is not None:
            for order in standing:
                courier.report_bound(order)

    def bind(self, step: int) -> BoundOrder | None:
        """At the end of ``step``: what goes into its vector. None on every rank but 0."""
        courier = self._courier
        if courier is None:
            return None
        self._binder.settle(courier.take_settled())
        binding = self._binder.bind(step, courier.newest_order())
        if binding.skipped_step is not None:
            _log.info("step %d is not saved: two saves are still under way", binding.skipped_step)
            courier.report_skipped(binding.skipped_step)
        if binding.bound is not None:
            courier.report_bound(binding.bound)
        return binding.bound

    @property
    def is_ending(self) -> bool:
        """Whether a step vector has told of an Order that ends the Attempt: the same on all ranks."""
        return self._plan.is_ending

    def waits_to_end(self, step: int) -> bool:
        """Whether rank 0 has an Order that ends the Attempt and may be bound at the end of ``step``. False elsewhere.

        Near the last step it is bound no more, but the Run ends there as soon.
        """
        order = None if self._courier is None else self._courier.newest_order()
        return order is not None and order.kind.ends_attempt and order.not_before_step <= step + BIND_AHEAD

    def learn(self, order: BoundOrder) -> None:
        """Take in what a step vector said."""
        self._plan.learn(order)

    def due(self, step: int) -> BoundOrder | None:
        """What must be carried out at the end of ``step``."""
        return self._plan.due(step)

    def leave_out(self, step: int) -> None:
        """The due save of ``step`` was not taken on this rank. The coordinator hears it of rank 0; of another rank it
        learns by the Receipt that does not come."""
        self._binder.settle((step,))
        if self._courier is not None:
            self._courier.report_skipped(step)
