"""What one Checkpoint holds, for `raysume checkpoints show`: layout, bytes by Level, ranks, metadata, lineage."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from math import prod
from typing import Any

from storage.commit_log import CommitLog
from storage.errors import CorruptCheckpoint, ObjectMissing
from storage.frames import itemsize_of, read_index
from storage.inventory import Inventory, fidelity_of
from storage.manifest import Commit, Manifest, ShardRecord, TensorLayout
from storage.object_source import ObjectStoreSource
from storage.sources import ShardLocation

__all__ = ["card_of", "card_text"]

_INDEXES_READ = 64
_LARGEST_TENSORS = 10


def card_of(log: CommitLog, commit: Commit, inventory: Inventory) -> dict[str, Any]:
    """The card as JSON. Raises CorruptCheckpoint when the Manifest is not what was committed."""
    manifest = log.read_manifest(commit)
    return {
        "run_id": manifest.run_id,
        "world_size": manifest.world_size,
        "tensors": len(manifest.tensors),
        "elements": sum(prod(layout.shape) for layout in manifest.tensors.values()),
        "shards": len(manifest.shards),
        "samples": manifest.ledger.position if manifest.ledger else None,
        "sample_chain": manifest.ledger.sample_chain if manifest.ledger else None,
        "fidelity": fidelity_of(manifest),
        "levels": _levels(log, manifest),
        "largest": _largest(manifest.tensors),
        "ranks": [{"rank": shard.rank, "bytes": shard.size, "key": shard.key} for shard in manifest.shards],
        "lineage": _lineage(commit, inventory),
        "metadata": manifest.metadata,
        "manifest": commit.manifest_key,
        "commit": commit.object_key,
    }


def card_text(card: dict[str, Any]) -> str:
    """The card for people."""
    from orchestrator.report_text import size

    names = (
        "step",
        "attempt",
        "standing",
        "time_utc",
        "age",
        "size",
        "loss",
        "metric",
        "run_id",
        "world_size",
        "verified",
    )
    rows = [(name, card[name]) for name in (*names, "fidelity", "tensors", "elements", "samples", "manifest")]
    lines = [f"{name:<16}{_shown(value)}" for name, value in rows]
    lines += ["", "levels"]
    for level, told in card["levels"].items():
        stored = "" if told["stored_bytes"] is None else f", {size(told['stored_bytes'])} stored"
        lines.append(f"  {level:<6}{told['tensors']:>6} tensors {size(told['raw_bytes']):>10}{stored}")
    lines += ["", "largest tensors"]
    lines += [f"  {one['name']:<48} {one['dtype']:<10} {one['shape']}" for one in card["largest"]]
    lines += ["", "shards"]
    lines += [f"  rank {one['rank']:>5}  {size(one['bytes']):>10}" for one in card["ranks"][:_LARGEST_TENSORS]]
    if len(card["ranks"]) > _LARGEST_TENSORS:
        lines.append(f"  and {len(card['ranks']) - _LARGEST_TENSORS} more (--json lists all)")
    lines += ["", "lineage (newest first)"]
    lines += [f"  attempt {one['attempt']} went on from {_from(one['base_step'])}" for one in card["lineage"]]
    lines += ["", "metadata (--json has the whole configuration)", *_metadata_lines(card["metadata"])]
    return "\n".join(lines)


def _levels(log: CommitLog, manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Tensors and bytes of each Level; stored bytes stand in the Shards' indexes, read where they are not too many."""
    told: dict[str, dict[str, Any]] = {}
    for layout in manifest.tensors.values():
        one = told.setdefault(layout.level, {"tensors": 0, "raw_bytes": 0, "stored_bytes": None})
        one["tensors"] += 1
        one["raw_bytes"] += prod(layout.shape) * itemsize_of(layout.dtype)
    if len(manifest.shards) > _INDEXES_READ:
        return dict(sorted(told.items()))
    try:
        for level, num_bytes in _stored(log, manifest.step, manifest.shards):
            if level in told:
                told[level]["stored_bytes"] = (told[level]["stored_bytes"] or 0) + num_bytes
    except (CorruptCheckpoint, ObjectMissing):  # `verify` names it; the card shows what the Manifest says
        for one in told.values():
            one["stored_bytes"] = None
    return dict(sorted(told.items()))


def _stored(log: CommitLog, step: int, shards: Iterable[ShardRecord]) -> list[tuple[str, int]]:
    source = ObjectStoreSource(log.store)  # tells a Shard that ends too early from a store that stays away
    stored: list[tuple[str, int]] = []
    for shard in shards:
        place = ShardLocation(rank=shard.rank, tier="object-storage", location=shard.key)
        index = read_index(partial(source.read_range, place), shard, step=step)
        stored += [(chunk.level, sum(frame.stored_bytes for frame in chunk.frames)) for chunk in index.chunks]
    return stored


def _largest(tensors: dict[str, TensorLayout]) -> list[dict[str, Any]]:
    ordered = sorted(tensors.items(), key=lambda item: (-prod(item[1].shape) * itemsize_of(item[1].dtype), item[0]))
    return [
        {"name": name, "dtype": layout.dtype, "shape": list(layout.shape), "level": layout.level}
        for name, layout in ordered[:_LARGEST_TENSORS]
    ]


def _lineage(commit: Commit, inventory: Inventory) -> list[dict[str, int]]:
    """Attempt by Attempt, back to the beginning, as far as their Commits are still there."""
    commits = {
        (found.commit.attempt.number, found.commit.step): found.commit for found in inventory.steps if found.commit
    }
    chain = [commit]
    while chain[-1].base_step:
        older = [
            other
            for (number, step), other in commits.items()
            if step == chain[-1].base_step and number < chain[-1].attempt.number
        ]
        if not older:
            break
        chain.append(max(older, key=lambda other: other.attempt.number))
    return [{"attempt": one.attempt.number, "base_step": one.base_step} for one in chain]


def _from(base_step: int) -> str:
    return f"step {base_step}" if base_step else "the beginning"


def _metadata_lines(metadata: dict[str, Any]) -> list[str]:
    versions = metadata.get("versions")
    lines = [f"  {name:<14}{value}" for name, value in versions.items()] if isinstance(versions, dict) else []
    lines += [f"  {name:<14}{_shown(value)}" for name, value in metadata.items() if name not in ("config", "versions")]
    return lines or ["  none"]


def _shown(value: object) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
