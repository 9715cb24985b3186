"""Receipts of one step become its Manifest, or are refused: every rank once, every tensor covered exactly once, and
what several ranks hold the same on all of them.

Pure: nothing is read or written. Receipts are folded in as they come, so that after the last of 10,000 little is left
to do; what is wrong with one is said when the Manifest is asked for, never to the Keeper that sent it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from storage.errors import CommitRefused
from storage.keys import shard_key
from storage.layout import LayoutFold, layout_problem
from storage.manifest import LedgerRange, Manifest, Receipt, TensorLayout
from storage.replicas import ReplicaFold, ReplicasDisagree

__all__ = ["StepMerge", "manifest_problem", "merge_receipts"]

_SHOWN_RANKS = 8


class StepMerge:
    """The Receipts of one step on their way to a Manifest. Not thread-safe."""

    def __init__(self) -> None:
        self._first: Receipt | None = None
        self._receipts: dict[int, Receipt] = {}
        self._folds: dict[str, LayoutFold] = {}
        self._replicas = ReplicaFold()
        self._twice: set[int] = set()
        self._refusal: str | None = None

    def __len__(self) -> int:
        return len(self._receipts)

    def __contains__(self, rank: int) -> bool:
        return rank in self._receipts

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        """The Receipts in rank order, without their layouts."""
        return tuple(self._receipts[rank] for rank in sorted(self._receipts))

    def add(self, receipt: Receipt) -> None:
        """Fold one Receipt in. Of two of one rank the first stays, and the step will be refused."""
        rank = receipt.shard.rank
        if rank in self._receipts:
            self._twice.add(rank)
            return
        self._first = self._first or receipt
        rank_state = self._replicas.add(rank, receipt.rank_state)
        self._receipts[rank] = receipt.model_copy(update={"tensors": {}, "rank_state": rank_state})
        if self._refusal is None:
            self._refusal = _misfit(receipt, self._first)
        if self._refusal is None and rank < receipt.world_size:
            self._refusal = self._fold(receipt)

    def _fold(self, receipt: Receipt) -> str | None:
        rank, max_blocks = receipt.shard.rank, max(64, 2 * receipt.world_size)
        for name, layout in receipt.tensors.items():
            fold = self._folds.get(name)
            if fold is None:
                fold = self._folds[name] = LayoutFold(rank, layout)
            problem = fold.add(rank, layout, max_blocks)
            if problem is not None:
                return f"step {receipt.step}: tensor {name} {problem}"
        return None

    def manifest(
        self,
        *,
        time_utc: str,
        metadata: Mapping[str, JsonValue],
        ledger: LedgerRange | None,
    ) -> Manifest:
        """The Manifest of the one step, Attempt and world size that all Receipts belong to.

        Raises CommitRefused, as ReplicasDisagree where that is the reason.
        """
        if self._first is None:
            raise CommitRefused("no Receipts to commit")
        refusal = self._refusal or self._rank_problem(self._first)
        if refusal is not None:
            raise CommitRefused(refusal)
        disagreement = self._replicas.disagreement()
        if disagreement is not None:
            raise ReplicasDisagree(self._first.step, self._first.step_key.attempt.label, disagreement)
        receipts = self.receipts
        first = receipts[0]
        if first.shared_state is None:
            raise CommitRefused(f"step {first.step}: the Receipt of rank 0 carries no shared state")
        # Built from records that were checked one by one: no need to check 10,000 of them again.
        return Manifest.model_construct(
            run_id=first.run_id,
            step=first.step,
            attempt=first.attempt,
            world_size=first.world_size,
            time_utc=time_utc,
            shards=tuple(receipt.shard for receipt in receipts),
            tensors=self._layouts(first.step),
            shared_state=first.shared_state,
            rank_states=tuple(receipt.rank_state for receipt in receipts),
            metadata=dict(metadata),
            ledger=ledger,
            lossless_fallbacks=sum(receipt.lossless_fallbacks for receipt in receipts),
        )

    def _layouts(self, step: int) -> dict[str, TensorLayout]:
        layouts: dict[str, TensorLayout] = {}
        for name in sorted(self._folds):
            layout = self._folds[name].finish()
            if isinstance(layout, str):
                raise CommitRefused(f"step {step}: tensor {name} {layout}")
            layouts[name] = layout
        return layouts

    def _rank_problem(self, first: Receipt) -> str | None:
        missing = sorted(set(range(first.world_size)) - self._receipts.keys())
        extra = sorted(rank for rank in self._receipts if rank >= first.world_size)
        if not (missing or extra or self._twice):
            return None
        return (
            f"step {first.step} of attempt {first.step_key.attempt.label}: not one Receipt of each of "
            f"{first.world_size} ranks{_listed('; missing', missing)}{_listed('; twice', sorted(self._twice))}"
            f"{_listed('; unknown', extra)}"
        )


def merge_receipts(
    receipts: Sequence[Receipt],
    *,
    time_utc: str,
    metadata: Mapping[str, JsonValue],
    ledger: LedgerRange | None,
) -> Manifest:
    """All Receipts at once. Raises CommitRefused."""
    merge = StepMerge()
    for receipt in sorted(receipts, key=lambda receipt: receipt.shard.rank):
        merge.add(receipt)
    return merge.manifest(time_utc=time_utc, metadata=metadata, ledger=ledger)


def manifest_problem(manifest: Manifest) -> str | None:
    """What makes a stored Manifest unusable although its bytes are those that were written; None when it holds."""
    num = manifest.world_size
    ranks = [shard.rank for shard in manifest.shards]
    if ranks != list(range(num)):
        return f"it lists {len(ranks)} Shards that are not those of ranks 0 to {num - 1} in order"
    if len(manifest.rank_states) != num:
        return f"it holds the state of {len(manifest.rank_states)} ranks, the world size is {num}"
    step_key = manifest.step_key
    for shard in manifest.shards:
        if shard.key != shard_key(step_key, shard.rank):
            return f"the Shard of rank {shard.rank} lies at {shard.key}, which is not its name"
    for name, layout in manifest.tensors.items():
        problem = layout_problem(layout, num)
        if problem is not None:
            return f"tensor {name} {problem}"
    return None


def _misfit(receipt: Receipt, first: Receipt) -> str | None:
    """Why ``receipt`` is not of the same save as ``first``, or None."""
    rank = receipt.shard.rank
    where = f"step {first.step} of attempt {first.attempt.value().label}"
    if (receipt.run_id, receipt.step, receipt.attempt) != (first.run_id, first.step, first.attempt):
        return (
            f"{where} of run {first.run_id}: rank {rank} sent a Receipt of {receipt.step_key.stem} "
            f"of run {receipt.run_id}; parts of two attempts never make one Checkpoint"
        )
    if receipt.world_size != first.world_size:
        return (
            f"{where}: rank {rank} saved at world size {receipt.world_size}, rank {first.shard.rank} at "
            f"{first.world_size}"
        )
    if receipt.shard.key != shard_key(first.step_key, rank):
        return f"{where}: the Shard of rank {rank} lies at {receipt.shard.key}, which is not its name"
    if receipt.shard.index_bytes >= receipt.shard.size:
        return (
            f"{where}: the index of rank {rank} has {receipt.shard.index_bytes} bytes, its whole Shard only "
            f"{receipt.shard.size}"
        )
    return None


def _listed(title: str, ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return f"{title}: rank {', '.join(map(str, ranks[:_SHOWN_RANKS]))}{more}"
