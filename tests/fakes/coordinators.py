"""A CoordinatorPort without a driver: records what rank 0 brings and serves scripted Orders."""

from __future__ import annotations

import threading
from collections.abc import Callable

from storage.keys import Attempt
from workers.contract import (
    BoundOrder,
    EvalReport,
    ExchangeReply,
    ExchangeRequest,
    Order,
    OrderKind,
    ShareReport,
    StepReport,
)
from workers.errors import CoordinatorUnavailable

__all__ = ["ScriptedCoordinator"]


class ScriptedCoordinator:
    """``order_after``: once a report of that step has come, serve Order 1 of ``kind``. ``num_failures`` calls raise."""

    def __init__(
        self,
        attempt: Attempt,
        *,
        order_after: int | None = None,
        kind: OrderKind = OrderKind.LEAVE,
        not_before_step: int = 0,
        settles: bool = True,
        num_failures: int = 0,
        is_current: bool = True,
    ) -> None:
        self._changed = threading.Condition()
        self._attempt, self._order_after, self._kind = attempt, order_after, kind
        self._not_before_step, self._settles = not_before_step, settles
        self._num_failures, self._is_current = num_failures, is_current
        self.reports: list[StepReport] = []
        self.evals: list[EvalReport] = []
        self.bound: list[BoundOrder] = []
        self.skipped: list[int] = []
        self.shares: list[ShareReport] = []
        self.num_calls = 0

    def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        with self._changed:
            self.num_calls += 1
            if self._num_failures > 0:
                self._num_failures -= 1
                self._changed.notify_all()
                raise CoordinatorUnavailable("the test says so")
            self.reports.extend(request.reports)
            self.evals.extend(request.evals)
            self.bound.extend(request.bound)
            self.skipped.extend(request.skipped)
            self.shares.extend(request.shares)
            self._changed.notify_all()
            settled = tuple(order.step for order in self.bound) if self._settles else ()
            return ExchangeReply(
                attempt=self._attempt, order=self._order(), settled_steps=settled, is_current=self._is_current
            )

    def wait_for(self, condition: Callable[[ScriptedCoordinator], bool], timeout_s: float = 20.0) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: condition(self), timeout_s)

    def _order(self) -> Order | None:
        if self._order_after is None or not any(report.step >= self._order_after for report in self.reports):
            return None
        return Order(
            attempt=self._attempt, number=1, kind=self._kind, not_before_step=self._not_before_step, reason="test"
        )
