"""The Orders of an Attempt: numbered as they are issued, and why each was. Which Order to issue is not its matter."""

from __future__ import annotations

import logging

from storage.errors import CommitRefused
from storage.keys import Attempt
from workers.contract import BoundOrder, Order, OrderKind

__all__ = ["LAST_STEP", "OrderBook"]

_log = logging.getLogger(__name__)
LAST_STEP = "last-step: the last step is always saved"
_KEPT_REASONS = 256  # rank 0 binds the newest Order alone


class OrderBook:
    """Owned and locked by the coordinator. Numbers rise over all Attempts of a driver."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._attempt: Attempt | None = None
        self._num_orders = 0
        self._parted = 0  # the last Order to part that ranks were heard to have bound
        self._reasons: dict[int, str] = {}
        self.newest: Order | None = None

    def begin(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self.newest = None

    @property
    def is_leaving(self) -> bool:
        return self.newest is not None and self.newest.kind.ends_attempt

    def issue(self, kind: OrderKind, reason: str, *, newest_step: int) -> Order:
        if self._attempt is None:
            raise CommitRefused(f"no Attempt to order a {kind.name} for")
        if self.newest is not None and self.newest.kind.ends_attempt and not kind.ends_attempt:
            # A rank that has not met the Leave yet would never hear of it. What it does on leaving is saved as well.
            return self.newest
        self._num_orders += 1
        self.newest = Order(
            attempt=self._attempt,
            number=self._num_orders,
            kind=kind,
            not_before_step=newest_step + 1,
            reason=reason,
        )
        self._reasons[self._num_orders] = reason
        self._reasons.pop(self._num_orders - _KEPT_REASONS, None)
        _log.info("order %d: %s, not before step %d: %s", self._num_orders, kind.name, newest_step + 1, reason)
        return self.newest

    def reason_of(self, bound: BoundOrder) -> str:
        if bound.number:
            return self._reasons.get(bound.number, "order")
        return LAST_STEP if bound.step == self._total_steps else "cadence"

    def is_first_word_of_parting(self, bound: BoundOrder) -> bool:
        """Whether ``bound``, an Order to part, is heard of for the first time: news can come twice."""
        is_first = bound.number != self._parted
        self._parted = bound.number
        return is_first
