"""Receipts of one step become its Manifest, or are refused: every rank once, every tensor covered exactly once.

Pure: nothing is read or written. Must stay quick for 10,000 Receipts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

from pydantic import JsonValue

from storage.errors import CommitRefused
from storage.keys import shard_key
from storage.manifest import ChunkPlace, LedgerRange, Manifest, ProbeRecord, Receipt, TensorLayout

__all__ = ["merge_receipts"]

_SHOWN_RANKS = 8


def merge_receipts(
    receipts: Sequence[Receipt],
    *,
    time_utc: str,
    metadata: Mapping[str, JsonValue],
    ledger: LedgerRange | None,
    probe: ProbeRecord | None = None,
) -> Manifest:
    """The Manifest of the one step, Attempt and world size that all ``receipts`` belong to. Raises CommitRefused."""
    if not receipts:
        raise CommitRefused("no Receipts to commit")
    ordered = sorted(receipts, key=lambda receipt: receipt.shard.rank)
    first = ordered[0]
    _check_ranks(ordered)
    if first.shared_state is None:
        raise CommitRefused(f"step {first.step}: the Receipt of rank 0 carries no shared state")
    return Manifest(
        run_id=first.run_id,
        step=first.step,
        attempt=first.attempt,
        world_size=first.world_size,
        time_utc=time_utc,
        shards=tuple(receipt.shard for receipt in ordered),
        tensors=_merged_layouts(ordered),
        shared_state=first.shared_state,
        rank_states=tuple(receipt.rank_state for receipt in ordered),
        metadata=dict(metadata),
        ledger=ledger,
        probe=probe,
    )


def _check_ranks(ordered: Sequence[Receipt]) -> None:
    first = ordered[0]
    where = f"step {first.step} of attempt {first.step_key.attempt.label}"
    for receipt in ordered:
        rank = receipt.shard.rank
        if (receipt.run_id, receipt.step_key) != (first.run_id, first.step_key):
            raise CommitRefused(
                f"{where} of run {first.run_id}: rank {rank} sent a Receipt of {receipt.step_key.stem} "
                f"of run {receipt.run_id}; parts of two attempts never make one Checkpoint"
            )
        if receipt.world_size != first.world_size:
            raise CommitRefused(
                f"{where}: rank {rank} saved at world size {receipt.world_size}, rank {first.shard.rank} at "
                f"{first.world_size}"
            )
        if receipt.shard.key != shard_key(receipt.step_key, rank):
            raise CommitRefused(f"{where}: the Shard of rank {rank} lies at {receipt.shard.key}, which is not its name")
    ranks = [receipt.shard.rank for receipt in ordered]
    if ranks != list(range(first.world_size)):
        missing = sorted(set(range(first.world_size)) - set(ranks))
        twice = sorted({rank for rank, following in pairwise(ranks) if rank == following})
        extra = sorted({rank for rank in ranks if rank >= first.world_size})
        raise CommitRefused(
            f"{where}: not one Receipt of each of {first.world_size} ranks"
            f"{_listed('; missing', missing)}{_listed('; twice', twice)}{_listed('; unknown', extra)}"
        )


def _listed(title: str, ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return f"{title}: rank {', '.join(map(str, ranks[:_SHOWN_RANKS]))}{more}"


def _merged_layouts(ordered: Sequence[Receipt]) -> dict[str, TensorLayout]:
    parts: dict[str, list[TensorLayout]] = {}
    owners: dict[str, list[int]] = {}
    for receipt in ordered:
        for name, layout in receipt.tensors.items():
            parts.setdefault(name, []).append(layout)
            owners.setdefault(name, []).append(receipt.shard.rank)
    step = ordered[0].step
    return {name: _merged(step, name, owners[name], layouts) for name, layouts in sorted(parts.items())}


def _merged(step: int, name: str, ranks: Sequence[int], layouts: Sequence[TensorLayout]) -> TensorLayout:
    first = layouts[0]
    # Ranks come in rising order, so of identical (replicated) chunks the lowest rank's is kept.
    chunks: dict[tuple[tuple[int, ...], tuple[int, ...]], ChunkPlace] = {}
    for rank, layout in zip(ranks, layouts, strict=True):
        if (layout.dtype, layout.shape, layout.level) != (first.dtype, first.shape, first.level):
            raise CommitRefused(
                f"step {step}: tensor {name} is {layout.dtype} {layout.shape} {layout.level} on rank {rank} but "
                f"{first.dtype} {first.shape} {first.level} on rank {ranks[0]}"
            )
        for chunk in layout.chunks:
            if chunk.rank != rank:
                raise CommitRefused(f"step {step}: tensor {name}: rank {rank} reports a chunk of rank {chunk.rank}")
            if 0 not in chunk.sizes:
                chunks.setdefault((chunk.offsets, chunk.sizes), chunk)
    kept = sorted(chunks.values(), key=lambda chunk: chunk.offsets)
    _check_cover(step, name, first.shape, kept)
    return TensorLayout(dtype=first.dtype, shape=first.shape, level=first.level, chunks=tuple(kept))


def _check_cover(step: int, name: str, shape: tuple[int, ...], chunks: Sequence[ChunkPlace]) -> None:
    """Inside the tensor, disjoint, and of its volume together: then the chunks cover it exactly once."""
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
            raise CommitRefused(
                f"step {step}: tensor {name} has {len(shape)} dimensions, the chunk of rank {chunk.rank} has "
                f"{len(chunk.offsets)} offsets and {len(chunk.sizes)} sizes"
            )
        if any(offset + size > limit for offset, size, limit in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            raise CommitRefused(
                f"step {step}: tensor {name} of shape {shape}: the chunk of rank {chunk.rank} at {chunk.offsets} of "
                f"{chunk.sizes} reaches outside"
            )
    _check_disjoint(step, name, shape, chunks)
    covered, volume = sum(prod(chunk.sizes) for chunk in chunks), prod(shape)
    if covered != volume:
        raise CommitRefused(
            f"step {step}: tensor {name} of shape {shape} has a gap: {covered} of {volume} elements were saved"
        )


def _check_disjoint(step: int, name: str, shape: tuple[int, ...], chunks: Sequence[ChunkPlace]) -> None:
    """Sweep along the dimension that is cut most often, comparing only chunks that meet there."""
    if len(chunks) < 2:
        return
    axis = max(range(len(shape)), key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}), default=None)
    if axis is None:
        raise CommitRefused(f"step {step}: tensor {name} has no dimensions but {len(chunks)} different chunks")
    active: list[ChunkPlace] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[axis]):
        start = chunk.offsets[axis]
        active = [other for other in active if other.offsets[axis] + other.sizes[axis] > start]
        for other in active:
            if _overlap(chunk, other):
                raise CommitRefused(
                    f"step {step}: tensor {name}: the chunks of rank {other.rank} at {other.offsets} of {other.sizes} "
                    f"and rank {chunk.rank} at {chunk.offsets} of {chunk.sizes} overlap"
                )
        active.append(chunk)


def _overlap(one: ChunkPlace, other: ChunkPlace) -> bool:
    return all(
        a < b + b_size and b < a + a_size
        for a, a_size, b, b_size in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
