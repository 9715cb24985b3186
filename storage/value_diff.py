"""Compares the values of two Checkpoints tensor by tensor, frame by frame, whatever their shardings.

Needs no torch. Held in memory at any time: one frame of A, the frames of B that overlap it, and the indexes of the
Shards in use. Every byte has passed its frame's digest.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from storage.elements import float_values
from storage.errors import CorruptCheckpoint, ObjectMissing
from storage.frames import itemsize_of, num_rows, read_index, read_rows
from storage.manifest import ChunkIndex, ChunkPlace, Manifest, ShardRecord
from storage.object_source import ObjectStoreSource, ObjectTooShort
from storage.object_store import ObjectStore
from storage.sources import ShardLocation

__all__ = ["CheckpointValues", "TensorDifference", "compare_tensor"]

_KEPT_INDEXES = 64

Bytes = NDArray[np.uint8]
_Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """How far two tensors are apart. ``relative_l2`` is the norm of the difference over the norm of A.

    Elements that are not finite on either side and not the same bits are counted in ``num_not_finite`` and left out of
    the two measures.
    """

    name: str
    num_elements: int
    num_different: int
    num_not_finite: int
    max_abs: float
    relative_l2: float

    @property
    def is_equal(self) -> bool:
        """Equal to the bit."""
        return self.num_different == 0


@dataclass(slots=True)
class _Sums:
    elements: int = 0
    different: int = 0
    not_finite: int = 0
    max_abs: float = 0.0
    squared: float = 0.0
    squared_before: float = 0.0

    def add(self, before: Bytes, after: Bytes, dtypes: tuple[str, str]) -> None:
        """Take in two runs of elements, each a row of bytes per element."""
        self.elements += len(before)
        a = float_values(np.ascontiguousarray(before).reshape(-1).data, dtypes[0])
        same_type = dtypes[0] == dtypes[1]
        if same_type and np.array_equal(before, after):
            finite = a[np.isfinite(a)]
            self.squared_before += float(np.sum(np.abs(finite) ** 2))
            return
        b = float_values(np.ascontiguousarray(after).reshape(-1).data, dtypes[1])
        differs = (before != after).any(axis=1) if same_type else a != b
        finite_both = np.isfinite(a) & np.isfinite(b)
        self.different += int(np.count_nonzero(differs))
        self.not_finite += int(np.count_nonzero(differs & ~finite_both))
        distance = np.abs(b[finite_both] - a[finite_both])
        self.max_abs = max(self.max_abs, float(distance.max(initial=0.0)))
        self.squared += float(np.sum(distance**2))
        self.squared_before += float(np.sum(np.abs(a[finite_both]) ** 2))

    def result(self, name: str) -> TensorDifference:
        distance, norm = math.sqrt(self.squared), math.sqrt(self.squared_before)
        return TensorDifference(
            name=name,
            num_elements=self.elements,
            num_different=self.different,
            num_not_finite=self.not_finite,
            max_abs=self.max_abs,
            relative_l2=distance / norm if norm else (math.inf if distance else 0.0),
        )


@dataclass(slots=True)
class CheckpointValues:
    """The stored rows of one Checkpoint's tensors. Indexes of the Shards used last are kept."""

    store: ObjectStore
    manifest: Manifest
    _source: ObjectStoreSource = field(init=False)
    _records: dict[int, ShardRecord] = field(init=False)
    _indexes: OrderedDict[int, dict[tuple[str, tuple[int, ...]], ChunkIndex]] = field(
        init=False, default_factory=OrderedDict
    )

    def __post_init__(self) -> None:
        self._source = ObjectStoreSource(self.store)
        self._records = {record.rank: record for record in self.manifest.shards}

    def chunk(self, name: str, place: ChunkPlace) -> ChunkIndex:
        """The index entry of ``name`` at ``place``. Raises CorruptCheckpoint."""
        record = self._records.get(place.rank)
        if record is None:
            step = self.manifest.step
            raise CorruptCheckpoint(step, name, f"the manifest names no shard of rank {place.rank}", place.rank)
        chunk = self._index(record).get((name, place.offsets))
        if chunk is None or chunk.sizes != place.sizes or chunk.dtype != self.manifest.tensors[name].dtype:
            reason = f"its index lists no chunk of {name} at {place.offsets} of {place.sizes}"
            raise CorruptCheckpoint(self.manifest.step, record.key, reason, record.rank)
        return chunk

    def rows(self, chunk: ChunkIndex, rank: int, start: int, stop: int) -> Bytes:
        """Rows ``[start, stop)`` of ``chunk`` in its own numbering, as bytes: (rows, other sizes..., itemsize)."""
        record = self._records[rank]
        try:
            raw = read_rows(chunk, start, stop, self._fetch(record), step=self.manifest.step, key=record.key, rank=rank)
        except ObjectMissing as error:
            raise CorruptCheckpoint(self.manifest.step, record.key, _absence(error), rank) from error
        return np.frombuffer(raw, dtype=np.uint8).reshape(stop - start, *chunk.sizes[1:], itemsize_of(chunk.dtype))

    def _fetch(self, record: ShardRecord) -> Callable[[int, int], bytes]:
        """Ranges of one Shard; one that ends too early is damage, not an outage."""
        place = ShardLocation(rank=record.rank, tier="object-storage", location=record.key)
        return partial(self._source.read_range, place)

    def _index(self, record: ShardRecord) -> dict[tuple[str, tuple[int, ...]], ChunkIndex]:
        found = self._indexes.pop(record.rank, None)
        if found is None:
            try:
                index = read_index(self._fetch(record), record, step=self.manifest.step)
            except ObjectMissing as error:
                raise CorruptCheckpoint(self.manifest.step, record.key, _absence(error), record.rank) from error
            found = {(chunk.name, chunk.offsets): chunk for chunk in index.chunks}
        self._indexes[record.rank] = found
        if len(self._indexes) > _KEPT_INDEXES:
            self._indexes.popitem(last=False)
        return found


def _absence(error: ObjectMissing) -> str:
    if isinstance(error, ObjectTooShort):
        return f"{error.size} bytes, at least {error.needed} were committed"
    return "missing file"


def compare_tensor(name: str, before: CheckpointValues, after: CheckpointValues) -> TensorDifference:
    """Compare tensor ``name``, of one shape in both. Raises CorruptCheckpoint or StoreUnavailable."""
    a_layout, b_layout = before.manifest.tensors[name], after.manifest.tensors[name]
    places = _Places(tuple(b_layout.chunks))
    if a_layout.shape != b_layout.shape:
        raise ValueError(f"{name} is {a_layout.shape} in A and {b_layout.shape} in B: only its shape can be compared")
    sums = _Sums()
    dtypes = (a_layout.dtype, b_layout.dtype)
    for place in a_layout.chunks:
        chunk = before.chunk(name, place)
        for frame in chunk.frames:
            ours = before.rows(chunk, place.rank, *frame.rows)
            box = _box_of(place, frame.rows)
            for shared, theirs in _overlaps(name, after, places, box):
                sums.add(_cut(ours, box, shared), theirs, dtypes)
    return sums.result(name)


def _box_of(place: ChunkPlace, rows: tuple[int, int]) -> _Box:
    """The part of the whole tensor that these rows of a chunk are, per dimension ``(start, stop)``."""
    if not place.sizes:
        return ()
    first = place.offsets[0]
    others = ((offset, offset + size) for offset, size in zip(place.offsets[1:], place.sizes[1:], strict=True))
    return ((first + rows[0], first + rows[1]), *others)


class _Places:
    """The chunks of one tensor, found by their first rows: with thousands of ranks trying each would be quadratic."""

    def __init__(self, places: Sequence[ChunkPlace]) -> None:
        self._places = sorted(places, key=_first_row)
        self._starts = [_first_row(place) for place in self._places]
        self._tallest = max((num_rows(place.sizes) for place in places), default=0)

    def near(self, box: _Box) -> Sequence[ChunkPlace]:
        """Every chunk that may overlap ``box``, and few others."""
        if not box:
            return self._places
        begin = bisect_right(self._starts, box[0][0] - self._tallest)
        return self._places[begin : bisect_left(self._starts, box[0][1])]


def _first_row(place: ChunkPlace) -> int:
    return place.offsets[0] if place.offsets else 0


def _overlaps(name: str, values: CheckpointValues, places: _Places, box: _Box) -> Iterator[tuple[_Box, Bytes]]:
    """Each stored part of ``name`` inside ``box``: where it lies in the tensor, and its elements as rows of bytes."""
    for place in places.near(box):
        whole = _box_of(place, (0, num_rows(place.sizes)))
        shared = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(box, whole, strict=True))
        if any(start >= stop for start, stop in shared):
            continue
        chunk = values.chunk(name, place)
        start, stop = (0, 1) if not shared else (shared[0][0] - place.offsets[0], shared[0][1] - place.offsets[0])
        read = _box_of(place, (start, stop))
        yield shared, _cut(values.rows(chunk, place.rank, start, stop), read, shared)


def _cut(block: Bytes, box: _Box, part: _Box) -> Bytes:
    """The elements of ``block`` (which lies at ``box``) that lie in ``part``, one row of bytes each."""
    slices = tuple(slice(stop[0] - start[0], stop[1] - start[0]) for start, stop in zip(box, part, strict=True))
    cut = block[slices] if slices else block
    return np.ascontiguousarray(cut).reshape(-1, block.shape[-1])
