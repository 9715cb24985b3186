"""Why each save was bound."""

from __future__ import annotations

from orchestrator.order_book import LAST_STEP, OrderBook
from storage.keys import Attempt
from workers.contract import BoundOrder, OrderKind


def test_a_save_without_an_order_is_of_the_cadence_or_of_the_last_step() -> None:
    book = OrderBook(100)
    book.begin(Attempt(number=1, nonce="0123abcd"))
    order = book.issue(OrderKind.SNAPSHOT, "hazard: due", newest_step=10)
    bound = BoundOrder(number=order.number, kind=OrderKind.SNAPSHOT, step=12)
    assert book.reason_of(bound) == "hazard: due"
    assert book.reason_of(BoundOrder(number=0, kind=OrderKind.SNAPSHOT, step=20)) == "cadence"
    assert book.reason_of(BoundOrder(number=0, kind=OrderKind.SNAPSHOT, step=100)) == LAST_STEP
