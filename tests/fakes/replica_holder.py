"""A ReplicaHolder that keeps bytes in ordinary memory and counts what becomes of its rooms."""

from __future__ import annotations

import threading

from storage.errors import StorageError
from storage.keys import Attempt
from storage.transport import ReplicaRef

__all__ = ["FakeHolder", "FakeRoom"]


class FakeRoom:
    def __init__(self, holder: FakeHolder, ref: ReplicaRef) -> None:
        self._holder, self.ref = holder, ref
        self.content = bytearray(ref.num_bytes)

    @property
    def view(self) -> memoryview:
        return memoryview(self.content)

    def seal(self) -> None:
        self._holder.end(self, is_sealed=True)

    def drop(self) -> None:
        self._holder.end(self, is_sealed=False)


class FakeHolder:
    """``refuses_with``: raised instead of making room. ``changed``: notified whenever a room is made or ends."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.refs: list[ReplicaRef] = []
        self.open_rooms: list[FakeRoom] = []
        self.sealed: dict[tuple[Attempt, int, int], bytes] = {}
        self.num_rooms = self.num_dropped = 0
        self.refuses_with: StorageError | None = None

    def make_room(self, ref: ReplicaRef) -> FakeRoom | None:
        with self.changed:
            if self.refuses_with is not None:
                raise self.refuses_with
            if (ref.attempt, ref.step, ref.rank) in self.sealed:
                return None
            room = FakeRoom(self, ref)
            self.refs.append(ref)
            self.open_rooms.append(room)
            self.num_rooms += 1
            self.changed.notify_all()
            return room

    def open_generation(self, attempt: Attempt, step: int, rank: int) -> memoryview | None:
        with self.changed:
            content = self.sealed.get((attempt, step, rank))
        return None if content is None else memoryview(content)

    def end(self, room: FakeRoom, *, is_sealed: bool) -> None:
        with self.changed:
            self.open_rooms.remove(room)  # raises when the room was ended before
            if is_sealed:
                self.sealed[room.ref.attempt, room.ref.step, room.ref.rank] = bytes(room.content)
            else:
                self.num_dropped += 1
            self.changed.notify_all()

    def wait_dropped(self, num: int, timeout_s: float = 20) -> bool:
        """Until ``num`` rooms were dropped; False when they were not."""
        with self.changed:
            return self.changed.wait_for(lambda: self.num_dropped >= num, timeout_s)

    def wait_rooms(self, num: int, timeout_s: float = 20) -> bool:
        """Until ``num`` rooms were made in all; False when they were not."""
        with self.changed:
            return self.changed.wait_for(lambda: self.num_rooms >= num, timeout_s)
