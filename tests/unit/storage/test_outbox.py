"""The Outbox with its real thread: what is told in one call, in which order, and how a delay is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from storage.keys import Attempt, StepKey, shard_key
from storage.manifest import AttemptRecord, Receipt, ShardRecord
from storage.outbox import DelayNotice, Outbox, OutboxMessage

FIRST = Attempt(number=1, nonce="00000001")
WAIT_S = 20.0


class Coordinator:
    """Answers as ``answer`` says, and can be held up."""

    def __init__(self, answer: Callable[[Receipt], bool] = lambda _: True) -> None:
        self._answer = answer
        self._gate = threading.Event()
        self._changed = threading.Condition()
        self.calls: list[tuple[tuple[int, int], ...]] = []
        self.delays: list[tuple[int, float]] = []
        self.words: list[str] = []

    def deliver(self, receipt: Receipt) -> bool:
        raise AssertionError(f"step {receipt.step}: told one by one")

    def deliver_many(self, receipts: tuple[Receipt, ...]) -> tuple[bool, ...]:
        with self._changed:
            self.calls.append(tuple((receipt.step, receipt.shard.rank) for receipt in receipts))
            self._changed.notify_all()
        if not self._gate.wait(WAIT_S):
            raise AssertionError("the gate stayed closed")
        return tuple(self._answer(receipt) for receipt in receipts)

    def report_failed(self, attempt: Attempt, step: int, rank: int, reason: str) -> bool:
        self.words.append(f"{attempt.number} {step} {rank} {reason}")
        return True

    def report_delayed(self, attempt: Attempt, step: int, rank: int, reason: str, failing_for_s: float) -> bool:
        with self._changed:
            self.delays.append((step, failing_for_s))
            self.words.append(f"{attempt.number} {step} {rank} {reason}")
            self._changed.notify_all()
        return True

    def open(self) -> None:
        self._gate.set()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(is_so, WAIT_S)


def message(step: int, rank: int = 0) -> OutboxMessage:
    shard = ShardRecord(
        rank=rank,
        key=shard_key(StepKey(step=step, attempt=FIRST), rank),
        size=1,
        digest="0" * 32,
        index_bytes=1,
        index_digest="0" * 32,
    )
    receipt = Receipt(run_id="run", step=step, attempt=AttemptRecord.of(FIRST), world_size=200, shard=shard, tensors={})
    return OutboxMessage(attempt=FIRST, step=step, rank=rank, receipt=receipt)


@pytest.fixture
def make() -> Iterator[Callable[..., Outbox]]:
    made: list[tuple[Outbox, Coordinator]] = []

    def outbox(coordinator: Coordinator, **options: object) -> Outbox:
        box = Outbox(coordinator, print, first_wait_s=0.001, longest_wait_s=0.01, **options)  # type: ignore[arg-type]
        made.append((box, coordinator))
        return box

    yield outbox
    for box, coordinator in made:
        coordinator.open()
        box.close()


def test_what_waits_goes_in_one_call_of_at_most_64(make: Callable[..., Outbox]) -> None:
    coordinator = Coordinator()
    outbox = make(coordinator)
    outbox.put(message(1))
    coordinator.wait_until(lambda: len(coordinator.calls) == 1)
    for rank in range(100):
        outbox.put(message(2, rank))
    coordinator.open()
    assert outbox.drain(WAIT_S)
    assert [len(call) for call in coordinator.calls] == [1, 64, 36]


def test_each_rank_keeps_its_step_order_while_calls_are_refused(make: Callable[..., Outbox]) -> None:
    """The coordinator takes a Receipt for the end of all earlier steps of its rank."""
    taken: list[tuple[int, int]] = []

    def answer(receipt: Receipt) -> bool:
        is_taken = len(coordinator.calls) > 3 or receipt.shard.rank == 2
        if is_taken:
            taken.append((receipt.step, receipt.shard.rank))
        return is_taken

    coordinator = Coordinator(answer)
    outbox = make(coordinator)
    outbox.put(message(1))
    coordinator.wait_until(lambda: len(coordinator.calls) == 1)
    for step in (2, 3, 4):
        for rank in (0, 1, 2):
            outbox.put(message(step, rank))
    coordinator.open()
    assert outbox.drain(WAIT_S)
    assert len(coordinator.calls) == 4
    for rank, expected in ((0, [1, 2, 3, 4]), (1, [2, 3, 4]), (2, [2, 3, 4])):
        assert [step for step, of in taken if of == rank] == expected


def test_one_that_can_never_be_delivered_does_not_take_the_others_with_it(make: Callable[..., Outbox]) -> None:
    taken: set[int] = set()

    def answer(receipt: Receipt) -> bool:
        if receipt.shard.rank == 3:
            raise RuntimeError("this one alone")
        taken.add(receipt.shard.rank)
        return True

    coordinator = Coordinator(answer)
    outbox = make(coordinator)
    coordinator.open()
    for rank in range(6):
        outbox.put(message(1, rank))
    coordinator.wait_until(lambda: taken == {0, 1, 2, 4, 5})
    assert not outbox.drain(0.0)


def test_everything_taken_is_told_to_the_keeper(make: Callable[..., Outbox]) -> None:
    coordinator = Coordinator()
    done: list[OutboxMessage] = []
    outbox = make(coordinator, on_done=done.append)
    coordinator.open()
    outbox.put(message(1))
    outbox.put(OutboxMessage(attempt=FIRST, step=2, rank=0, receipt=None, reason="disk full"))
    outbox.put(message(3))
    assert outbox.drain(WAIT_S)
    assert [m.step for m in done] == [1, 2, 3]
    assert coordinator.words == ["1 2 0 disk full"]


def test_a_delay_is_told_again_with_its_age_until_it_ends(make: Callable[..., Outbox]) -> None:
    now = [100.0]
    coordinator = Coordinator()
    outbox = make(coordinator, delay_every_s=0.001, clock=lambda: now[0])
    outbox.say_delayed(DelayNotice(attempt=FIRST, step=10, rank=2, reason="away", since_s=90.0))
    coordinator.wait_until(lambda: len(coordinator.delays) >= 1)
    now[0] = 150.0
    coordinator.wait_until(lambda: (10, 60.0) in coordinator.delays)
    assert coordinator.delays[0] == (10, 10.0)
    assert coordinator.words[0] == "1 10 2 away"
    outbox.end_delay(FIRST, 2)
    assert outbox.drain(WAIT_S)


def test_a_delay_is_told_while_receipts_wait(make: Callable[..., Outbox]) -> None:
    coordinator = Coordinator(lambda _: False)
    outbox = make(coordinator, delay_every_s=0.001)
    coordinator.open()
    outbox.put(message(1))
    outbox.say_delayed(DelayNotice(attempt=FIRST, step=10, rank=2, reason="away", since_s=0.0))
    coordinator.wait_until(lambda: len(coordinator.delays) >= 2)


def test_a_fenced_attempt_is_told_of_no_more(make: Callable[..., Outbox]) -> None:
    coordinator = Coordinator(lambda _: False)
    outbox = make(coordinator, delay_every_s=0.001)
    coordinator.open()
    outbox.put(message(1))
    outbox.say_delayed(DelayNotice(attempt=FIRST, step=10, rank=2, reason="away", since_s=0.0))
    coordinator.wait_until(lambda: len(coordinator.delays) >= 1 and len(coordinator.calls) >= 2)
    outbox.fence(2)
    assert outbox.drain(WAIT_S)
    outbox.say_delayed(DelayNotice(attempt=FIRST, step=11, rank=2, reason="away", since_s=0.0))
    assert all(step == 10 for step, _ in coordinator.delays)
