"""The last look before a Commit: are the Shards it will name there? One listing, whatever the number of ranks.

Content is not read: the Keeper read each footer back after its upload, `verify` reads the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from storage.errors import CommitRefused, ObjectMissing
from storage.keys import StepKey, shard_prefix
from storage.manifest import ShardRecord
from storage.object_store import ObjectStore

__all__ = ["check_presence"]

logger = logging.getLogger(__name__)

_TAIL_BYTES = 24
_MAX_READ = 16  # of the Shards that a listing lacks: as many decide whether the listing or the Shards are at fault
_SHOWN = 8


def check_presence(store: ObjectStore, step_key: StepKey, shards: Sequence[ShardRecord]) -> None:
    """Raises CommitRefused, naming ranks and keys, unless every Shard is stored with the size of its record.

    Some stores list an object only a while after it was put. A Shard that the listing lacks is therefore read from
    before it counts as missing, and a listing found to lag has no say.
    """
    sizes = {entry.key: entry.size for entry in store.list(shard_prefix(step_key))}
    wrong = [
        f"rank {shard.rank}: {shard.key} has {sizes[shard.key]} bytes, its Receipt says {shard.size}"
        for shard in shards
        if sizes.get(shard.key, shard.size) != shard.size
    ]
    unlisted = [shard for shard in shards if shard.key not in sizes]
    absent = [shard for shard in unlisted[:_MAX_READ] if not _can_be_read(store, shard)]
    wrong += [f"rank {shard.rank}: {shard.key} is missing" for shard in absent]
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        what = f"step {step_key.step} of attempt {step_key.attempt.label}"
        raise CommitRefused(f"{what} is not committed: {'; '.join(wrong[:_SHOWN])}{more}")
    if unlisted:
        logger.warning(
            "%s: its listing lags: %d of %d shards of step %d are stored but not listed yet",
            store.url,
            len(unlisted),
            len(shards),
            step_key.step,
        )


def _can_be_read(store: ObjectStore, shard: ShardRecord) -> bool:
    length = min(_TAIL_BYTES, shard.size)
    try:
        store.get_range(shard.key, shard.size - length, length)
    except ObjectMissing:
        return False
    return True
