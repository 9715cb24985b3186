"""What a Keeper has yet to ship, lane by lane: which Shipment is next to be encoded or uploaded, which are overtaken.

A plain ledger without threads or I/O; the Keeper owns and locks it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from storage.keeper_protocol import SealedSnapshot
from storage.keys import Attempt
from storage.manifest import Receipt
from storage.object_store import GrowingObject
from storage.retry_tally import RetryTally
from storage.shipping import MemorySink

__all__ = ["Lanes", "Shipment", "Stage"]


class Stage(Enum):
    """Where a Shipment stands. ENCODING and UPLOADING: a thread is at it."""

    SEALED = auto()
    ENCODING = auto()
    READY = auto()
    UPLOADING = auto()


@dataclass(slots=True, kw_only=True, eq=False)
class Shipment:
    """One Snapshot on its way to the store. ``snapshot`` None: its Shard was found in the spool.

    ``in_memory``: the spool had no room, or there is none; its buffer and ``content`` are held until it is durable.
    ``growing``: what of it went to the store while it was encoded.
    """

    attempt: Attempt
    step: int
    rank: int
    snapshot: SealedSnapshot | None
    receipt: Receipt | None = None
    content: MemorySink | None = None
    growing: GrowingObject | None = None
    in_memory: bool = False
    stage: Stage = Stage.SEALED
    num_failures: int = 0
    retries: RetryTally = field(default_factory=RetryTally)
    last_reason: str = ""
    retry_at_s: float = 0.0

    @classmethod
    def of_spooled(cls, receipt: Receipt) -> Shipment:
        """One whose Shard was found in the spool."""
        attempt, rank = receipt.attempt.value(), receipt.shard.rank
        return cls(attempt=attempt, step=receipt.step, rank=rank, snapshot=None, receipt=receipt, stage=Stage.READY)

    @property
    def lane(self) -> tuple[int, int]:
        return self.attempt.number, self.rank

    @property
    def is_at_work(self) -> bool:
        return self.stage in (Stage.ENCODING, Stage.UPLOADING)

    @property
    def is_delayed(self) -> bool:
        """Waiting for its next try after the store failed it."""
        return self.num_failures > 0 and not self.is_at_work

    @property
    def where(self) -> str:
        return f"attempt {self.attempt.label} step {self.step} rank {self.rank}"

    def stop_growing(self) -> None:
        """Nothing of it goes to the store any more, but by a put that has begun."""
        if self.growing is not None:
            self.growing.abandon()
        self.growing = None


class Lanes:
    """Shipments of one rank in one Attempt leave in step order, one at a time; lanes do not wait for each other."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, int], list[Shipment]] = {}

    def __iter__(self) -> Iterator[Shipment]:
        return (shipment for lane in self._lanes.values() for shipment in lane)

    @property
    def num_in_flight(self) -> int:
        """Those being uploaded, or between two tries of it."""
        return sum(shipment.stage is Stage.UPLOADING or shipment.is_delayed for shipment in self)

    @property
    def num_staged(self) -> int:
        return sum(1 for _ in self) - self.num_in_flight

    @property
    def is_empty(self) -> bool:
        return not self._lanes

    def add(self, shipment: Shipment) -> None:
        lane = self._lanes.setdefault(shipment.lane, [])
        lane.append(shipment)
        lane.sort(key=lambda waiting: waiting.step)

    def remove(self, shipment: Shipment) -> None:
        lane = self._lanes.get(shipment.lane, [])
        if shipment in lane:
            lane.remove(shipment)
        if not lane:
            self._lanes.pop(shipment.lane, None)

    def next_to_encode(self) -> Shipment | None:
        """The oldest sealed Snapshot that may go to the spool and has none of its lane being encoded before it."""
        found = []
        for lane in self._lanes.values():
            if not any(shipment.stage is Stage.ENCODING for shipment in lane):
                found += [s for s in lane if s.stage is Stage.SEALED and not s.in_memory][:1]
        return min(found, key=lambda shipment: shipment.step, default=None)

    def next_to_upload(self, now_s: float) -> Shipment | None:
        """The oldest head of a lane that is encoded, or will be in memory, and whose next try is due or pointless."""
        heads = (lane[0] for lane in self._lanes.values())
        ready = [
            head
            for head in heads
            if (head.retry_at_s <= now_s or self.overtaking(head) is not None)
            and (head.stage is Stage.READY or (head.stage is Stage.SEALED and head.in_memory))
        ]
        return min(ready, key=lambda shipment: shipment.step, default=None)

    def next_try_s(self) -> float | None:
        """When the first delayed Shipment is due."""
        return min((shipment.retry_at_s for shipment in self if shipment.is_delayed), default=None)

    def is_first(self, shipment: Shipment) -> bool:
        """Whether nothing of its lane has to be durable before it."""
        return self._lanes.get(shipment.lane, [shipment])[0] is shipment

    def overtaking(self, shipment: Shipment) -> Shipment | None:
        """The newest of its lane, when that is another and newer one."""
        lane = self._lanes.get(shipment.lane, [])
        return lane[-1] if lane and lane[-1].step > shipment.step else None

    def oldest_spooled_before(self, newer: Shipment) -> Shipment | None:
        """What gives way when the disk is full: it waits in the spool, and ``newer`` will stand for it."""
        waiting = (s for s in self._lanes.get(newer.lane, []) if s.step < newer.step)
        return next((s for s in waiting if s.stage is Stage.READY and not s.in_memory), None)

    def before(self, number: int) -> list[Shipment]:
        """Everything of Attempts below ``number`` that no thread is at."""
        return [shipment for shipment in self if shipment.attempt.number < number and not shipment.is_at_work]
