"""Carries sealed Snapshots from their buffers to the local disk, to the store, and their Receipts to the coordinator.

Threads and the order of things; the ledger is storage.lanes', the bytes are storage.shipping's. It admits nobody: the
Keeper decides which Snapshots come here, and which Attempts are over.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from storage.arena import Arena
from storage.config import CheckpointConfig
from storage.direct_io import DiskFull
from storage.errors import StoreRefused, StoreUnavailable
from storage.frames import ShardSink
from storage.keeper_protocol import KeeperStatus, ReceiptSink, SealedSnapshot
from storage.lanes import Lanes, Shipment, Stage
from storage.lenient_spool import LenientSpool
from storage.manifest import Receipt
from storage.object_store import ObjectStore
from storage.outbox import DelayNotice, Outbox, OutboxMessage
from storage.shipping import MemorySink, key_of, most_bytes, streamed, upload_shard, write_snapshot
from storage.spool import Spool, SpoolEntry
from storage.store_health import FailingCall, StoreHealth

__all__ = ["Shipper"]

logger = logging.getLogger(__name__)

_NUM_UPLOADERS: Final = 2
_NUM_ENCODERS: Final = 2
_IDLE_S: Final = 30.0
_MOST_LEFT: Final = 128  # Shards of a killed Keeper that are taken up: less than the outbox holds without waiting


class Shipper:
    """Two threads encode to ``spool`` (None: to memory, while uploading), two upload. Takes Snapshots without waiting.

    While the store is away the newest Snapshot of each lane is kept and tried again; older ones are given up for it.
    """

    def __init__(
        self,
        store: ObjectStore,
        sink: ReceiptSink,
        config: CheckpointConfig,
        arena: Arena,
        spool: Spool | None,
        clock: Callable[[], float],
        *,
        resend_s: tuple[float, float],
        retry_s: tuple[float, float],
    ) -> None:
        self._store, self._config, self._arena, self._clock = store, config, arena, clock
        self._spool = LenientSpool(spool, self._note_error)
        self._outbox = Outbox(
            sink,
            self._note_error,
            self._note_acknowledged,
            first_wait_s=resend_s[0],
            longest_wait_s=resend_s[1],
            clock=clock,
        )
        self._changed = threading.Condition()
        self._lanes = Lanes()
        self._health = StoreHealth(*retry_s)
        self._oldest_attempt = 0
        self._last_error: str | None = None
        self._is_closed = False
        self._pool = ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 1) // 4)), thread_name_prefix="keeper-encode")
        self._take_up_what_was_left()
        loops = [self._upload_loop] * _NUM_UPLOADERS + [self._encode_loop] * (_NUM_ENCODERS if spool else 0)
        self._threads = [
            threading.Thread(target=loop, name=f"keeper{loop.__name__.replace('_', '-')}-{number}", daemon=True)
            for number, loop in enumerate(loops)
        ]
        for thread in self._threads:
            thread.start()

    def take(self, snapshot: SealedSnapshot) -> None:
        """Ship ``snapshot``, whose buffer is sealed. Bounded by the arena: two buffers a rank."""
        shipment = Shipment(
            attempt=snapshot.attempt,
            step=snapshot.step,
            rank=snapshot.rank,
            snapshot=snapshot,
            in_memory=not self._spool.is_there,
        )
        with self._changed:
            self._lanes.add(shipment)
            self._changed.notify_all()

    def fence(self, number: int) -> None:
        """Drop everything of Attempts below ``number``; what a thread is at is dropped when that is done."""
        with self._changed:
            self._oldest_attempt = max(self._oldest_attempt, number)
            over = self._lanes.before(self._oldest_attempt)
            for shipment in over:
                self._lanes.remove(shipment)
        self._outbox.fence(number)
        for shipment in over:
            logger.info("%s: dropped, attempt %d began", shipment.where, number)
            self._let_go(shipment)

    def flush(self, timeout_s: float) -> bool:
        """Wait until every Snapshot is durable and acknowledged, or its failure reported. False when time is up."""
        until = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._lanes.is_empty, timeout=timeout_s)
            if not self._lanes.is_empty:
                return False
        return self._outbox.drain(until - time.monotonic())

    def status(self) -> KeeperStatus:
        arena_bytes, spool_bytes = self._arena.used_bytes, self._spool.used_bytes
        unacknowledged = self._outbox.num_pending
        with self._changed:
            return KeeperStatus(
                in_flight=self._lanes.num_in_flight,
                staged=self._lanes.num_staged,
                unacknowledged=unacknowledged,
                arena_bytes=arena_bytes,
                last_error=self._last_error,
                memory_bytes=sum(shipment.content.num_bytes for shipment in self._lanes if shipment.content),
                spool_bytes=spool_bytes,
                failing_for_s=self._health.failing_for_s(self._clock()),
                retries=self._health.num_retries,
                superseded=self._health.num_superseded,
            )

    def close(self, timeout_s: float, *, keep_unsent: bool) -> None:
        """Stop without flushing. The spool goes too, but with ``keep_unsent`` stays when something in it is unsent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._outbox.close(timeout_s)
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        is_idle = not any(thread.is_alive() for thread in self._threads)
        self._pool.shutdown(wait=is_idle, cancel_futures=True)
        self._spool.close(keep_unsent=keep_unsent)

    def _take_up_what_was_left(self) -> None:
        """Go on where a Keeper before this one was killed; all but the newest Attempt it knew is over."""
        entries = self._spool.entries()[-_MOST_LEFT:]
        newest = max((entry.receipt.attempt.number for entry in entries), default=0)
        for entry in entries:
            receipt = entry.receipt
            shipment = Shipment.of_spooled(receipt)
            if not entry.is_uploaded:
                if shipment.attempt.number < newest:
                    self._let_go(shipment)
                    continue
                logger.info("%s: found on this disk, not uploaded yet", shipment.where)
                self._lanes.add(shipment)
            elif not entry.is_acknowledged and shipment.attempt.number == newest:
                self._tell(shipment, receipt)

    def _encode_loop(self) -> None:
        while (shipment := self._next(self._lanes.next_to_encode, Stage.ENCODING)) is not None:
            self._to_spool(shipment)

    def _upload_loop(self) -> None:
        def choose() -> Shipment | None:
            return self._lanes.next_to_upload(time.monotonic())

        while (shipment := self._next(choose, Stage.UPLOADING)) is not None:
            self._to_store(shipment)

    def _next(self, choose: Callable[[], Shipment | None], stage: Stage) -> Shipment | None:
        with self._changed:
            while not self._is_closed:
                shipment = choose()
                if shipment is not None:
                    shipment.stage = stage
                    return shipment
                due_s = self._lanes.next_try_s()
                left_s = _IDLE_S if due_s is None else due_s - time.monotonic()
                self._changed.wait(timeout=min(_IDLE_S, max(0.01, left_s)))
        return None

    def _to_spool(self, shipment: Shipment) -> None:
        try:
            entry = self._write(shipment)
        except Exception as error:  # noqa: BLE001 - outer edge of the thread: reported, and the Keeper lives on
            self._give_up(shipment, f"{type(error).__name__}: {error}")
            return
        lease_id = shipment.snapshot.lease_id if shipment.snapshot and entry else None
        with self._changed:
            if entry is not None:
                shipment.receipt, shipment.snapshot, shipment.stage = entry.receipt, None, Stage.READY
            else:
                shipment.in_memory, shipment.stage = True, Stage.SEALED
            is_fenced = self._is_fenced(shipment)
            self._changed.notify_all()
        if lease_id is not None:
            self._arena.release(lease_id)
        if is_fenced:
            self._end(shipment, keep_file=False)

    def _write(self, shipment: Shipment) -> SpoolEntry | None:
        """The Shard on the local disk; None when it has to go through memory."""
        snapshot, write = shipment.snapshot, partial(self._encode, shipment)
        assert snapshot is not None
        while True:
            try:
                return self._spool.add(key_of(snapshot), most_bytes(snapshot), write, where=shipment.where)
            except DiskFull as error:
                older = self._take_older(shipment)
                if older is None:
                    self._spool.say_no_disk(shipment.where, error)
                    return None
                self._give_up(older, f"superseded by step {shipment.step}: {error}", is_superseded=True)

    def _encode(self, shipment: Shipment, sink: ShardSink) -> Receipt:
        """To ``sink``, and to the store at the same time where that delays nothing older."""
        snapshot = shipment.snapshot
        assert snapshot is not None
        shipment.stop_growing()  # a try before this one ended after its last byte
        buffer = self._arena.open(snapshot.lease_id, snapshot.num_bytes)
        with self._changed:
            may_stream = self._lanes.is_first(shipment) and self._health.failing_since_s is None
        store = self._store if may_stream else None
        is_over = partial(self._is_over, shipment)
        with streamed(store, snapshot, sink, self._config.store, shipment.retries, is_over) as (sink, growing):
            receipt = write_snapshot(snapshot, buffer, sink, self._config, self._clock, self._pool)
            shipment.growing = growing
        return receipt

    def _take_older(self, shipment: Shipment) -> Shipment | None:
        with self._changed:
            older = self._lanes.oldest_spooled_before(shipment)
            if older is not None:
                older.stage = Stage.ENCODING  # nobody else may take it up now
            return older

    def _to_store(self, shipment: Shipment) -> None:
        with self._changed:
            newer = self._lanes.overtaking(shipment) if shipment.num_failures else None
            is_over = self._is_over(shipment)
            if shipment.num_failures and newer is None and not is_over:
                self._health.num_retries += 1
                shipment.retries.add()
        if newer is not None and not is_over:
            self._give_up_for(shipment, newer)
            return
        try:
            receipt = None if is_over else self._upload(shipment)
        except StoreRefused as error:
            self._give_up(shipment, f"{type(error).__name__}: {error}")
        except StoreUnavailable as error:
            self._delay(shipment, f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 - outer edge of the thread, as in _to_spool
            self._give_up(shipment, f"{type(error).__name__}: {error}")
        else:
            self._settle(shipment, receipt)

    def _upload(self, shipment: Shipment) -> Receipt | None:
        """The Receipt of the Shard, now in the store; None when its Attempt ended before that."""
        if shipment.receipt is None:
            content = MemorySink()
            shipment.receipt = self._encode(shipment, content)
            shipment.content = content
            with self._changed:
                if self._is_over(shipment):
                    return None
        receipt = shipment.receipt
        if shipment.content is not None:
            return self._put(shipment, receipt, shipment.content.view())
        with self._spool.open(receipt.shard.key) as data:
            receipt = self._put(shipment, receipt, data)
        self._spool.mark_uploaded(receipt.shard.key, receipt)
        return receipt

    def _put(self, shipment: Shipment, receipt: Receipt, data: memoryview) -> Receipt:
        deadline_s = self._config.store.deadline_s
        failing = FailingCall(deadline_s, self._clock, partial(self._say_failing, shipment))
        put = partial(upload_shard, self._store, receipt, data, deadline_s=deadline_s, clock=self._clock)
        return put(tally=shipment.retries, on_retry=failing.note_retry)

    def _say_failing(self, shipment: Shipment, reason: str, since_s: float) -> None:
        with self._changed:
            since_s = self._health.note_failure(since_s)
            if self._is_over(shipment):
                return
        attempt, step, rank = shipment.attempt, shipment.step, shipment.rank
        self._outbox.say_delayed(DelayNotice(attempt=attempt, step=step, rank=rank, reason=reason, since_s=since_s))

    def _settle(self, shipment: Shipment, receipt: Receipt | None) -> None:
        """``receipt`` None: the Attempt was over before the upload."""
        with self._changed:
            is_over = receipt is None or self._is_over(shipment)
            if receipt is not None:
                self._health.note_success()
        if not is_over:
            self._tell(shipment, receipt)
        self._end(shipment, keep_file=not self._is_fenced(shipment))

    def _delay(self, shipment: Shipment, reason: str) -> None:
        """The store is away: keep the newest of the lane and try again later."""
        self._note_error(f"step {shipment.step} rank {shipment.rank}: {reason}")
        shipment.last_reason = reason
        with self._changed:
            since_s = self._health.note_failure(self._clock())
            newer, is_over = self._lanes.overtaking(shipment), self._is_over(shipment)
            if newer is None and not is_over:
                shipment.num_failures += 1
                wait_s = self._health.wait_s(shipment.num_failures)
                shipment.retry_at_s, shipment.stage = time.monotonic() + wait_s, Stage.READY
                self._changed.notify_all()
        if is_over:
            self._end(shipment, keep_file=not self._is_fenced(shipment))
        elif newer is not None:
            self._give_up_for(shipment, newer)
        else:
            logger.info("%s: not durable yet, tried again in %.1f s: %s", shipment.where, wait_s, reason)
            self._say_failing(shipment, reason, since_s)

    def _give_up_for(self, shipment: Shipment, newer: Shipment) -> None:
        reason = f"superseded by step {newer.step} while the store was away: {shipment.last_reason}"
        self._give_up(shipment, reason, is_superseded=True)

    def _give_up(self, shipment: Shipment, reason: str, *, is_superseded: bool = False) -> None:
        logger.info("%s: given up: %s", shipment.where, reason)
        self._note_error(f"step {shipment.step} rank {shipment.rank}: {reason}")
        with self._changed:
            is_over = self._is_over(shipment)
            self._health.num_superseded += is_superseded
        if not is_over:
            self._tell(shipment, None, reason)
        self._end(shipment, keep_file=self._is_closed and not self._is_fenced(shipment))

    def _tell(self, shipment: Shipment, receipt: Receipt | None, reason: str = "") -> None:
        attempt, step, rank = shipment.attempt, shipment.step, shipment.rank
        self._outbox.put(OutboxMessage(attempt=attempt, step=step, rank=rank, receipt=receipt, reason=reason))

    def _end(self, shipment: Shipment, *, keep_file: bool) -> None:
        """The one way out for a Shipment that a thread was at. Its word is in the outbox by now: lanes keep order."""
        self._outbox.end_delay(shipment.attempt, shipment.rank)
        self._let_go(shipment, keep_file=keep_file)
        with self._changed:
            self._lanes.remove(shipment)
            self._changed.notify_all()

    def _let_go(self, shipment: Shipment, *, keep_file: bool = False) -> None:
        """Free its buffer, its memory and, but for ``keep_file``, its file."""
        shipment.stop_growing()
        if shipment.snapshot is not None:
            self._arena.release(shipment.snapshot.lease_id)
        if shipment.receipt is not None and shipment.content is None and not keep_file:
            self._spool.drop(shipment.receipt.shard.key)
        shipment.content = None

    def _is_over(self, shipment: Shipment) -> bool:
        return self._is_closed or self._is_fenced(shipment)

    def _is_fenced(self, shipment: Shipment) -> bool:
        return shipment.attempt.number < self._oldest_attempt

    def _note_acknowledged(self, message: OutboxMessage) -> None:
        if message.receipt is not None:
            self._spool.mark_acknowledged(message.receipt.shard.key)

    def _note_error(self, text: str) -> None:
        with self._changed:
            self._last_error = text
