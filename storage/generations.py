"""The ledger of what a Keeper holds in memory: own generations, replicas of peers', which are whole, which may go.

Thread-safe, without threads or I/O of its own. Dropping follows the safe step alone: with step s of Attempt a safe,
everything of older Attempts and everything of a before s goes. More is given up only where room runs out (`give_way`,
`give_way_to_save`), and of a rank's replicas where newer ones come although none has become safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from storage.errors import StorageError
from storage.generation import Generation, Lane
from storage.keeper_protocol import MemoryProgress, SealedSnapshot, TransportAddress
from storage.keys import Attempt
from storage.transport import ReplicaRef

__all__ = ["Generations"]

_REPLICAS_PER_RANK: Final = 3
_ROOMS_PER_REPLICA: Final = 2  # the old connection of a sender that tries again may not be known to be dead


class Generations:
    """``drop`` frees the buffer of a Generation that goes; it is called under the lock and must not call back."""

    def __init__(self, drop: Callable[[Generation], None]) -> None:
        self._drop_buffer = drop
        self._changed = threading.Condition()
        self._held: list[Generation] = []
        self._incoming: list[ReplicaRef] = []
        self._lanes: dict[tuple[Attempt, int], Lane] = {}
        self._safe: tuple[int, int] = (-1, -1)  # Attempt number and step
        self._first_steps: dict[int, int] = {}
        self._newest_attempt = 0
        self._watchers: list[Callable[[], None]] = []
        self._is_closed = False

    # What comes in

    def note_lease(self, attempt: Attempt, step: int, safe_step: int, given_up: Sequence[int] = ()) -> None:
        """A rank of ``attempt`` is at ``step``, and knows ``safe_step`` (-1: none) to be whole everywhere, and those of
        the steps ``given_up`` never to become so."""
        with self._changed:
            self._note(attempt, step, safe_step)
            self._remove([g for g in self._held if g.attempt == attempt and g.step in given_up])

    def add_own(self, snapshot: SealedSnapshot, path: str) -> None:
        with self._changed:
            mine = [g for g in self._of(snapshot.attempt, snapshot.rank) if not g.is_replica]
            self._remove([g for g in mine if g.step == snapshot.step])
            for g in mine:
                g.is_given_up |= g.num_failures > 0  # the newest alone is tried again
            self._held.append(
                Generation(
                    attempt=snapshot.attempt,
                    step=snapshot.step,
                    rank=snapshot.rank,
                    world_size=snapshot.world_size,
                    lease_id=snapshot.lease_id,
                    path=path,
                    snapshot=snapshot,
                )
            )
            lane = self._lane(snapshot.attempt, snapshot.rank)
            lane.sealed_step = max(lane.sealed_step, snapshot.step)
            self._tell()

    def begin_replica(self, ref: ReplicaRef) -> bool:
        """Whether ``ref`` may come in; False when it is held. Raises StorageError when it is refused."""
        where = f"replica of step {ref.step} rank {ref.rank} of attempt {ref.attempt.label}"
        with self._changed:
            if ref.attempt.number < self._newest_attempt:  # nor is its word about what may go taken
                raise StorageError(f"{where}: that attempt is over, attempt {self._newest_attempt} has begun")
            self._note(ref.attempt, ref.step, ref.safe_step)
            if self._is_obsolete(ref.attempt, ref.step):
                raise StorageError(f"{where}: step {self._safe[1]} is safe, older ones are not kept")
            if self._find(ref.attempt, ref.step, ref.rank, is_replica=True):
                return False
            coming = [other for other in self._incoming if (other.attempt, other.rank) == (ref.attempt, ref.rank)]
            steps = {other.step for other in coming} | {g.step for g in self._of(ref.attempt, ref.rank) if g.is_replica}
            if len(steps - {ref.step}) >= _REPLICAS_PER_RANK and not self._give_up_replica(ref):
                raise StorageError(f"{where}: those of steps {sorted(steps)} are here and none of them may go yet")
            if sum(other.step == ref.step for other in coming) >= _ROOMS_PER_REPLICA:
                raise StorageError(f"{where}: it is coming in already, {_ROOMS_PER_REPLICA} times")
            self._incoming.append(ref)
            return True

    def end_replica(self, ref: ReplicaRef, lease_id: str | None = None, path: str = "") -> bool:
        """What `begin_replica` began is over. True when it is kept from now on, in the buffer of ``lease_id``."""
        with self._changed:
            self._incoming.remove(ref)
            is_late = ref.attempt.number < self._newest_attempt or self._is_obsolete(ref.attempt, ref.step)
            is_held = self._find(ref.attempt, ref.step, ref.rank, is_replica=True) is not None
            if lease_id is None or is_late or is_held or self._is_closed:
                return False
            self._held.append(
                Generation(
                    attempt=ref.attempt,
                    step=ref.step,
                    rank=ref.rank,
                    world_size=ref.world_size,
                    lease_id=lease_id,
                    path=path,
                    ref=ref,
                )
            )
            self._tell()
            return True

    # What goes

    def fence(self, number: int) -> None:
        """Attempts below ``number`` are over: what they hold stays, but nothing of them is replicated any more."""
        with self._changed:
            self._fence(number)

    def give_way(self, attempt: Attempt) -> bool:
        """Room has run out: of Attempts before ``attempt`` only the newest step of each rank that it can have begun
        from stays. False when nothing goes by that."""
        with self._changed:
            older = [g for g in self._held if g.attempt.number < attempt.number]
            first = self._first_steps.get(attempt.number, 1 << 62)
            best: dict[tuple[int, bool], tuple[int, int]] = {}
            for g in older:
                if g.step < first:
                    lane = (g.rank, g.is_replica)
                    best[lane] = max(best.get(lane, (-1, -1)), (g.step, g.attempt.number))
            over = [g for g in older if best.get((g.rank, g.is_replica)) != (g.step, g.attempt.number)]
            self._remove(over)
            return bool(over)

    def give_way_to_save(self, attempt: Attempt, becomes_free: Callable[[Generation], bool]) -> bool:
        """Room has run out for a save to the store, which outlasts whatever is in memory: one of those whose buffer
        ``becomes_free`` goes, of an older Attempt or with a replica elsewhere first. False: there is none."""
        with self._changed:
            found = [g for g in self._held if becomes_free(g)]
            found.sort(key=lambda g: (g.attempt.number >= attempt.number, g.is_replica, not g.is_replicated, g.step))
            self._remove(found[:1])
            return bool(found)

    def remove(self, generation: Generation, error: str) -> None:
        """It is not what was sealed: nobody may read it."""
        with self._changed:
            self._lane(generation.attempt, generation.rank).error = error
            self._remove([generation])
            self._tell()

    def close(self) -> None:
        """Whoever waits goes on; nothing is taken in any more."""
        with self._changed:
            self._is_closed = True
            self._tell()

    # Work of the replication threads

    def next_to_index(self) -> Generation | None:
        """Wait for the oldest sealed generation that has no index yet, and mark it as being worked at. None: closed."""
        return self._take(lambda _: [g for g in self._held if g.ref is None and not g.is_at_work], None)

    def next_to_send(self, clock: Callable[[], float]) -> Generation | None:
        """Wait for the oldest whole one that should have a replica and whose next try is due; a rank's go in order."""
        return self._take(self._sendable, clock)

    def set_whole(self, generation: Generation, ref: ReplicaRef) -> None:
        with self._changed:
            generation.ref, generation.is_at_work = ref, False
            if generation.snapshot is not None and generation.snapshot.peer is None:
                self._replicated(generation)
            elif generation.attempt.number < self._newest_attempt:
                generation.is_given_up = True
            self._tell()

    def set_replicated(self, generation: Generation) -> None:
        with self._changed:
            generation.is_at_work = False
            self._replicated(generation)
            self._tell()

    def set_failed(self, generation: Generation, error: str, retry_at_s: float, *, is_stalled: bool = False) -> None:
        """Tried again from ``retry_at_s`` on, unless a newer one stands for it. ``is_stalled``: nobody need wait."""
        with self._changed:
            generation.is_at_work = False
            generation.num_failures += 1
            generation.is_stalled = is_stalled
            lane = self._lane(generation.attempt, generation.rank)
            lane.error = error
            if lane.sealed_step > generation.step:
                generation.is_given_up = True
            else:
                generation.retry_at_s = retry_at_s
            self._tell()

    def retry_now(self, peer: TransportAddress) -> None:
        """What was to go to ``peer`` has somewhere else to go: nothing of it waits for its next try."""
        with self._changed:
            for g in self._held:
                if g.snapshot is not None and g.snapshot.peer == peer:
                    g.retry_at_s, g.num_failures, g.is_stalled = 0.0, 0, False
            self._tell()

    def put_back(self, generation: Generation) -> None:
        """Nothing was done: its buffer is gone."""
        with self._changed:
            generation.is_at_work = False
            self._remove([generation])

    # What is known

    def safe_step(self, attempt: Attempt) -> int:
        with self._changed:
            return self._safe[1] if self._safe[0] == attempt.number else -1

    def whole(self, attempt: Attempt | None = None, step: int | None = None) -> tuple[Generation, ...]:
        """What can be read, replicas included."""
        with self._changed:
            return tuple(
                g for g in self._held if g.ref and attempt in (None, g.attempt) and (step is None or step == g.step)
            )

    def find(self, attempt: Attempt, step: int, rank: int) -> Generation | None:
        """The whole one of that name, the rank's own before a replica."""
        with self._changed:
            for is_replica in (False, True):
                found = self._find(attempt, step, rank, is_replica=is_replica)
                if found is not None and found.ref is not None:
                    return found
            return None

    def bytes_held(self) -> tuple[int, int]:
        """Of own generations and of replicas."""
        with self._changed:
            own = sum(g.num_bytes or g.snapshot.num_bytes for g in self._held if g.snapshot)
            return own, sum(g.num_bytes for g in self._held if g.is_replica)

    def note_error(self, attempt: Attempt, rank: int, error: str) -> None:
        with self._changed:
            self._lane(attempt, rank).error = error
            self._tell()

    def error(self) -> str | None:
        """Why the newest of some rank of the newest Attempt has no replica."""
        with self._changed:
            newest = max((attempt.number for attempt, _ in self._lanes), default=0)
            newest = max(newest, self._newest_attempt)  # what an Attempt that is over has not sent, nobody waits for
            errors = (lane.error for (attempt, _), lane in self._lanes.items() if attempt.number == newest)
            return next((error for error in errors if error), None)

    def progress(self, attempt: Attempt, rank: int) -> MemoryProgress:
        with self._changed:
            lane = self._lanes.get((attempt, rank), Lane())
            return MemoryProgress(
                attempt=attempt,
                rank=rank,
                sealed_step=lane.sealed_step,
                replicated_step=lane.replicated_step,
                last_error=lane.error,
            )

    def is_decided(self, attempt: Attempt, rank: int, step: int) -> bool:
        """Whether the generation of ``step`` has its replica, or will not get one soon."""
        with self._changed:
            lane = self._lanes.get((attempt, rank), Lane())
            if self._is_closed or lane.replicated_step >= step or attempt.number < self._newest_attempt:
                return True
            found = self._find(attempt, step, rank, is_replica=False)
            return lane.sealed_step >= step if found is None else found.is_given_up or found.is_stalled

    def is_indexed(self) -> bool:
        """Whether all that is sealed is whole."""
        with self._changed:
            return self._is_closed or all(g.ref is not None for g in self._held)

    def wait_until(self, is_reached: Callable[[], bool], timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(is_reached, timeout=timeout_s)

    def watch(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """Have ``on_change``, which must not wait, called at every change. Returns the call that ends it."""

        def end() -> None:
            with self._changed:
                self._watchers.remove(on_change)

        with self._changed:
            self._watchers.append(on_change)
        return end

    # Below, the lock is held

    def _tell(self) -> None:
        self._changed.notify_all()
        for on_change in self._watchers:
            on_change()

    def _take(
        self, choose: Callable[[float], list[Generation]], clock: Callable[[], float] | None
    ) -> Generation | None:
        with self._changed:
            while not self._is_closed:
                now_s = clock() if clock else 0.0
                found = choose(now_s)
                if found:
                    found[0].is_at_work = True
                    return found[0]
                later = (g.retry_at_s - now_s for g in self._held if g.retry_at_s > now_s and self._wants_replica(g))
                self._changed.wait(timeout=min(later, default=30.0) if clock else 30.0)
            return None

    def _sendable(self, now_s: float) -> list[Generation]:
        found: list[Generation] = []
        lanes: set[tuple[Attempt, int]] = set()
        for g in sorted((g for g in self._held if g.snapshot and self._wants_replica(g)), key=lambda g: g.step):
            if (g.attempt, g.rank) in lanes:
                continue
            lanes.add((g.attempt, g.rank))
            if g.ref is not None and not g.is_at_work and g.retry_at_s <= now_s:
                found.append(g)
        return found

    def _wants_replica(self, generation: Generation) -> bool:
        return not (generation.is_replicated or generation.is_given_up)

    def _replicated(self, generation: Generation) -> None:
        generation.is_replicated = True
        lane = self._lane(generation.attempt, generation.rank)
        lane.replicated_step = max(lane.replicated_step, generation.step)
        if lane.replicated_step >= lane.sealed_step:
            lane.error = None

    def _note(self, attempt: Attempt, step: int, safe_step: int) -> None:
        self._fence(attempt.number)
        self._first_steps[attempt.number] = min(step, self._first_steps.get(attempt.number, step))
        if safe_step >= 0 and (attempt.number, safe_step) > self._safe:
            self._safe = (attempt.number, safe_step)
            self._remove([g for g in self._held if self._is_obsolete(g.attempt, g.step)])

    def _fence(self, number: int) -> None:
        if number <= self._newest_attempt:
            return
        self._newest_attempt = number
        for g in self._held:
            if g.attempt.number < number and not g.is_replicated:
                g.is_given_up = True
        self._lanes = {key: lane for key, lane in self._lanes.items() if key[0].number >= number - 1}
        self._first_steps = {key: step for key, step in self._first_steps.items() if key >= number}
        self._tell()

    def _is_obsolete(self, attempt: Attempt, step: int) -> bool:
        return (attempt.number, step) < self._safe

    def _remove(self, over: list[Generation]) -> None:
        over = [g for g in over if g in self._held]
        for g in over:
            self._held.remove(g)
            self._drop_buffer(g)
        if over:
            self._tell()

    def _give_up_replica(self, ref: ReplicaRef) -> bool:
        """Make room for a newer one where none is known to be safe, as while another rank's replicas fail: the oldest
        stays, which may be whole everywhere without our knowing. False when ``ref`` is not the newest."""
        replicas = sorted((g for g in self._of(ref.attempt, ref.rank) if g.is_replica), key=lambda g: g.step)
        if len(replicas) < _REPLICAS_PER_RANK or replicas[-1].step > ref.step:
            return False
        self._remove([replicas[1]])
        return True

    def _of(self, attempt: Attempt, rank: int) -> Iterator[Generation]:
        return (g for g in self._held if (g.attempt, g.rank) == (attempt, rank))

    def _find(self, attempt: Attempt, step: int, rank: int, *, is_replica: bool) -> Generation | None:
        return next((g for g in self._of(attempt, rank) if (g.step, g.is_replica) == (step, is_replica)), None)

    def _lane(self, attempt: Attempt, rank: int) -> Lane:
        return self._lanes.setdefault((attempt, rank), Lane())
