"""Checks a committed Checkpoint against everything that was recorded of it, and lists all that is wrong.

Two paths say what a Shard should be: the record in the Manifest, which came with its Receipt, and the Shard's own
footer. Where they disagree it is said which of the two the stored bytes agree with. Nothing is changed or quarantined
here. Needs neither torch nor ray, so it runs wherever the store can be reached. Shards are read side by side, in
windows of bounded size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final

import xxhash

from storage.codec import digest128
from storage.commit_log import CommitLog
from storage.errors import CorruptCheckpoint, ObjectMissing
from storage.frames import Fetch, decode_frame, read_index
from storage.keys import StepKey, shard_prefix
from storage.manifest import ChunkIndex, Commit, Frame, Manifest, ShardIndex, ShardRecord
from storage.object_store import ObjectStore
from storage.shard_format import TRAILER

__all__ = ["SHARDS_AT_ONCE", "Problem", "VerifyReport", "verify_commit"]

SHARDS_AT_ONCE: Final = 8
"""Shards read side by side: one stream of an object store is slow, and a large Checkpoint has hundreds of them."""
_WINDOW_BYTES = 4 << 20  # eight at once come within a read's time by the slowest link that a store may have
_MOST_BYTES: Final = SHARDS_AT_ONCE * _WINDOW_BYTES  # of reads under way, over all Shards
_LARGEST_FOOTER = 256 << 20
_LOOK_S: Final = 5.0

_ChunkIdentity = tuple[str, str, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong: the object, what is wrong with it, and the rank that wrote it."""

    key: str
    reason: str
    rank: int | None = None

    def __str__(self) -> str:
        return f"{self.key}{'' if self.rank is None else f' (rank {self.rank})'}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What verifying one Checkpoint found. ``bytes_read`` counts stored bytes of Shards."""

    step_key: StepKey
    is_deep: bool
    num_shards: int
    bytes_read: int
    problems: tuple[Problem, ...]

    @property
    def is_good(self) -> bool:
        return not self.problems


def verify_commit(
    store: ObjectStore,
    log: CommitLog,
    commit: Commit,
    deep: bool = True,
    *,
    at_once: Callable[[], int] = lambda: SHARDS_AT_ONCE,
) -> VerifyReport:
    """Manifest, presence, sizes and indexes; with ``deep`` also every digest, every frame decoded.

    ``at_once`` is asked before each Shard how many may be read side by side from now on; more than SHARDS_AT_ONCE never
    are. Store errors other than a missing object propagate: they say nothing of the Checkpoint.
    """
    try:
        manifest = log.read_manifest(commit)
    except CorruptCheckpoint as error:
        problem = Problem(key=error.key, reason=error.reason)
        return VerifyReport(step_key=commit.step_key, is_deep=deep, num_shards=0, bytes_read=0, problems=(problem,))
    sizes = {entry.key: entry.size for entry in store.list(shard_prefix(commit.step_key))}
    placed = _placed_by_rank(manifest)
    stopped = threading.Event()
    checks = [_ShardCheck(store, commit.step, record, stopped) for record in manifest.shards]

    def run(check: _ShardCheck) -> None:
        check.run(placed.get(check.rank, ()), sizes, deep)

    _side_by_side(run, checks, stopped, at_once)
    return VerifyReport(
        step_key=commit.step_key,
        is_deep=deep,
        num_shards=len(checks),
        bytes_read=sum(check.bytes_read for check in checks),
        problems=tuple(problem for check in checks for problem in check.problems),
    )


def _side_by_side(
    run: Callable[[_ShardCheck], None],
    checks: Sequence[_ShardCheck],
    stopped: threading.Event,
    at_once: Callable[[], int],
) -> None:
    """Run every check. Raises the first error of the store, when no check reads any more."""
    running: dict[Future[None], int] = {}

    def is_full(more: int) -> bool:
        is_too_much = sum(running.values()) + more > _MOST_BYTES
        return bool(running) and (is_too_much or len(running) >= min(at_once(), SHARDS_AT_ONCE))

    with ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="verify") as pool:
        try:
            for check in checks:
                while is_full(check.window_bytes):
                    _take_ended(running)
                running[pool.submit(run, check)] = check.window_bytes
            while running:
                _take_ended(running)
        finally:
            stopped.set()  # after an error: what runs ends before its next read


def _take_ended(running: dict[Future[None], int]) -> None:
    """Each read has a deadline of the store's, so one of them ends; until then others may be allowed to begin."""
    for ended in wait(running, timeout=_LOOK_S, return_when=FIRST_COMPLETED).done:
        del running[ended]
        ended.result()


class _Stopped(Exception):
    """Another Shard met an error of the store, so there is no verdict to come."""


class _ShardCheck:
    """Checks one Shard object, reading it once from front to back in bounded windows."""

    def __init__(self, store: ObjectStore, step: int, record: ShardRecord, stopped: threading.Event) -> None:
        self._store = store
        self._step = step
        self._record = record
        self._stopped = stopped
        self.problems: list[Problem] = []
        self.bytes_read = 0

    @property
    def rank(self) -> int:
        return self._record.rank

    @property
    def window_bytes(self) -> int:
        """The most that one read of it asks for; but for a frame that is larger than a window."""
        return min(self._record.size, max(_WINDOW_BYTES, self._record.index_bytes + TRAILER.size))

    def run(self, placed: Iterable[_ChunkIdentity], sizes: Mapping[str, int], deep: bool) -> None:
        record = self._record
        size = sizes.get(record.key)
        if size is None:
            self._report("missing file")
            return
        if size != record.size:
            self._report(f"{size} bytes, committed {record.size}")
            return
        try:
            index = read_index(self._fetch, record, step=self._step)
            self._check_layout(placed, index)
            if deep:
                self._check_content(index)
        except CorruptCheckpoint as error:
            self._report(f"{error.reason}; {self._footers_word()}")
        except ObjectMissing:  # deleted since the listing
            self._report("missing file")

    def _footers_word(self) -> str:
        """What the Shard says of itself where the record's word of its index does not hold."""
        record = self._record
        if record.size < TRAILER.size:
            return "it is too short for a footer of its own"
        num_bytes = TRAILER.unpack(self._fetch(record.size - TRAILER.size, TRAILER.size))[0]
        if num_bytes > min(record.size - TRAILER.size, _LARGEST_FOOTER):
            return f"its own footer claims {num_bytes} bytes: the Shard is wrong, not the record"
        footer = self._fetch(record.size - TRAILER.size - num_bytes, num_bytes)
        own = record.model_copy(update={"index_bytes": num_bytes, "index_digest": digest128(footer)})
        try:
            read_index(self._fetch, own, step=self._step)
        except CorruptCheckpoint as error:
            return f"its own footer does not hold either ({error.reason}): the Shard is wrong, not the record"
        return f"its own footer ({num_bytes} bytes, {own.index_digest}) holds together: the record is of other bytes"

    def _report(self, reason: str) -> None:
        self.problems.append(Problem(key=self._record.key, reason=reason, rank=self._record.rank))

    def _fetch(self, offset: int, length: int) -> bytes:
        if self._stopped.is_set():
            raise _Stopped
        self.bytes_read += length
        return self._store.get_range(self._record.key, offset, length)

    def _check_layout(self, placed: Iterable[_ChunkIdentity], index: ShardIndex) -> None:
        """Every chunk that the Manifest places in this Shard is in it, with the same type."""
        held = {(chunk.name, chunk.dtype, chunk.offsets, chunk.sizes) for chunk in index.chunks}
        for name, dtype, offsets, sizes in placed:
            if (name, dtype, offsets, sizes) not in held:
                self._report(f"the chunk of {name} at {offsets} of {sizes} ({dtype}) is not in it")

    def _check_content(self, index: ShardIndex) -> None:
        whole = xxhash.xxh3_128()
        windows = _Windows(self._fetch, self._record.size, whole)
        for chunk in index.chunks:
            raw = xxhash.xxh3_64()
            intact = True
            for number, frame in enumerate(chunk.frames):
                intact &= self._check_frame(chunk, number, windows.take(frame), raw)
            if intact and raw.hexdigest() != chunk.raw_digest:
                self._report(f"{chunk.name} decodes to {raw.hexdigest()}, committed {chunk.raw_digest}")
        windows.finish()
        if whole.hexdigest() != self._record.digest:
            word = (
                "the Shard's own index disagrees too: the Shard is wrong"
                if self.problems
                else "every frame agrees with the Shard's own index: the record is wrong"
            )
            self._report(
                f"hash mismatch of the whole object: {whole.hexdigest()}, committed {self._record.digest}; {word}"
            )

    def _check_frame(self, chunk: ChunkIndex, number: int, stored: memoryview, raw: xxhash.xxh3_64) -> bool:
        record = self._record
        try:
            raw.update(decode_frame(chunk, number, stored, step=self._step, key=record.key, rank=record.rank))
        except CorruptCheckpoint as error:
            self._report(error.reason)
            return False
        return True


class _Windows:
    """Frames of an object in order, from ranged reads of bounded size; everything read goes through ``whole``."""

    def __init__(self, fetch: Fetch, size: int, whole: xxhash.xxh3_128) -> None:
        self._fetch = fetch
        self._size = size
        self._whole = whole
        self._start = 0
        self._content = memoryview(b"")

    def take(self, frame: Frame) -> memoryview:
        """The stored bytes of ``frame``. Frames lie back to back and are asked for in order."""
        end = frame.offset + frame.stored_bytes
        if end > self._start + len(self._content):
            rest = bytes(self._content[frame.offset - self._start :])
            self._start = frame.offset
            self._content = memoryview(rest + self._read(frame.offset + len(rest), end))
        begin = frame.offset - self._start
        return self._content[begin : begin + frame.stored_bytes]

    def finish(self) -> None:
        """Read what follows the last frame, for the digest of the whole object."""
        position = self._start + len(self._content)
        while position < self._size:
            position += len(self._read(position, position))

    def _read(self, position: int, needed_end: int) -> bytes:
        end = min(self._size, max(needed_end, position + _WINDOW_BYTES))
        content = self._fetch(position, end - position)
        self._whole.update(content)
        return content


def _placed_by_rank(manifest: Manifest) -> dict[int, list[_ChunkIdentity]]:
    placed: dict[int, list[_ChunkIdentity]] = {}
    for name, layout in manifest.tensors.items():
        for chunk in layout.chunks:
            placed.setdefault(chunk.rank, []).append((name, layout.dtype, chunk.offsets, chunk.sizes))
    return placed
