"""Which Levels of a damaged Checkpoint are still whole. Reads frames and changes nothing.

Used to offer what can be saved when no Checkpoint is whole: with all of L1 there, training can go on with fresh
optimizer moments. Frames carry their own digests, so damage in one says nothing of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from storage.errors import CorruptCheckpoint, ObjectMissing
from storage.frames import decode_frame, read_index
from storage.manifest import ChunkIndex, ChunkPlace, Level, Manifest, ShardIndex, ShardRecord
from storage.object_source import ObjectStoreSource
from storage.object_store import ObjectStore
from storage.sources import ShardLocation

__all__ = ["whole_levels"]


def whole_levels(
    store: ObjectStore, manifest: Manifest, *, progress: Callable[[int], None] = lambda _: None
) -> frozenset[Level]:
    """Levels of which every chunk decodes to what was committed. Raises StoreUnavailable; damage is an answer.

    Of L1 the Manifest itself is a part: it holds the plain state, and whoever calls this has read it.
    """
    whole: set[Level] = {layout.level for layout in manifest.tensors.values()}
    wanted: dict[int, list[tuple[str, ChunkPlace, Level]]] = {}
    for name, layout in manifest.tensors.items():
        for place in layout.chunks:
            wanted.setdefault(place.rank, []).append((name, place, layout.level))
    for record in manifest.shards:
        whole -= _broken_levels(store, manifest.step, record, wanted.get(record.rank, []), whole, progress)
    return frozenset(whole)


def _broken_levels(
    store: ObjectStore,
    step: int,
    record: ShardRecord,
    wanted: list[tuple[str, ChunkPlace, Level]],
    interesting: set[Level],
    progress: Callable[[int], None],
) -> set[Level]:
    source = ObjectStoreSource(store)
    location = ShardLocation(rank=record.rank, tier="object-storage", location=record.key)
    fetch = partial(source.read_range, location)
    try:
        index = read_index(fetch, record, step=step)
    except (CorruptCheckpoint, ObjectMissing):
        return {level for _, _, level in wanted}
    chunks = {(chunk.name, chunk.offsets): chunk for chunk in index.chunks}
    broken: set[Level] = set()
    for name, place, level in wanted:
        if level in broken or level not in interesting:
            continue
        chunk = chunks.get((name, place.offsets))
        if chunk is None or chunk.sizes != place.sizes or not _decodes(fetch, chunk, index, record, progress):
            broken.add(level)
    return broken


def _decodes(
    fetch: Callable[[int, int], bytes],
    chunk: ChunkIndex,
    index: ShardIndex,
    record: ShardRecord,
    progress: Callable[[int], None],
) -> bool:
    for number, frame in enumerate(chunk.frames):
        try:
            stored = fetch(frame.offset, frame.stored_bytes)
            decode_frame(chunk, number, stored, step=index.step, key=record.key, rank=record.rank)
        except (CorruptCheckpoint, ObjectMissing):
            return False
        progress(frame.stored_bytes)
    return True
