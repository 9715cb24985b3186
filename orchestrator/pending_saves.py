"""The saves of one Attempt that are under way: which Receipts came, which steps are settled. A plain ledger.

Receipts are folded into their step's StepMerge at once: 10,000 of them kept as they came would fill gigabytes.
"""

from __future__ import annotations

from storage.manifest import Receipt
from storage.merge import StepMerge

__all__ = ["MAX_WHOLE", "SUPERSEDED", "PendingSaves"]

MAX_WHOLE = 3  # saves whose Commit waits for the store
SUPERSEDED = "superseded by step"
"""So the reason of a save begins, Keepers' too, that was given up for a newer one, which is kept: nothing failed."""
_MAX_UNDER_WAY = 8  # where Receipts of some ranks do not come at all, the others' must not gather without end
_MAX_REMEMBERED = 1024  # news that come again are of the last moments, and what is asked for is of the last save
_MAX_SETTLED = 64  # rank 0 has few unsettled saves; the tail of settled steps is all that it can still ask for


class PendingSaves:
    """From the first word of a save to its Commit or its end. Owned and locked by the coordinator."""

    def __init__(self) -> None:
        self._world_size = 0
        self._merges: dict[int, StepMerge] = {}
        self._settled: list[int] = []
        self._bound: set[int] = set()
        self.committed: set[int] = set()

    def begin(self, world_size: int) -> None:
        """Forget the last Attempt's saves."""
        self._world_size = world_size
        self._merges = {}
        self._settled = []
        self._bound = set()
        self.committed = set()

    def expect(self, step: int) -> bool:
        """Ranks were told to save ``step``. False when that was known before."""
        if step in self._bound:
            return False
        _remember(self._bound, step)
        if step not in self._settled:
            self._merges.setdefault(step, StepMerge())
        return True

    def add(self, receipt: Receipt) -> bool:
        """Record a Receipt; True when this was the last one missing of its step."""
        step, rank = receipt.step, receipt.shard.rank
        if step in self._settled or receipt.world_size != self._world_size or not 0 <= rank < self._world_size:
            return False
        merge = self._merges.setdefault(step, StepMerge())
        if rank in merge:
            return False
        merge.add(receipt)
        return len(merge) == self._world_size

    def whole(self, step: int) -> StepMerge | None:
        """All Receipts of ``step`` together; None while one is missing and after the step is settled."""
        merge = self._merges.get(step)
        return merge if merge is not None and len(merge) == self._world_size else None

    @property
    def whole_steps(self) -> tuple[int, ...]:
        """Steps whose Shards are all stored and whose Commit is not, oldest first."""
        return tuple(sorted(step for step in self._merges if self.whole(step) is not None))

    def overtaken_by(self, receipt: Receipt) -> tuple[int, ...]:
        """Earlier steps that this rank will never deliver: a Keeper ships one rank's Snapshots in step order."""
        rank = receipt.shard.rank
        return tuple(step for step, merge in self._merges.items() if step < receipt.step and rank not in merge)

    def crowded_out(self) -> tuple[int, ...]:
        """The oldest saves that are not whole, where there are too many: nobody hands those in any more."""
        partial = sorted(step for step in self._merges if self.whole(step) is None)
        return tuple(partial[: max(0, len(self._merges) - _MAX_UNDER_WAY)])

    def settle_committed(self, step: int) -> None:
        _remember(self.committed, step)
        self._settle(step)

    def give_up(self, step: int) -> bool:
        """The save of ``step`` will never be whole. False when it was settled before."""
        if step in self._settled:
            return False
        self._settle(step)
        return True

    def _settle(self, step: int) -> None:
        self._merges.pop(step, None)
        self._settled.append(step)
        del self._settled[:-_MAX_SETTLED]

    def settled_steps(self) -> tuple[int, ...]:
        return tuple(self._settled)

    def is_settled(self, step: int | None) -> bool:
        """Whether ``step`` is over, or with None whether nothing is under way."""
        return not self._merges if step is None else step in self._settled

    def missing(self) -> dict[int, tuple[int, ...]]:
        return {
            step: tuple(rank for rank in range(self._world_size) if rank not in merge)
            for step, merge in self._merges.items()
        }


def _remember(steps: set[int], step: int) -> None:
    """An Attempt may last for months and save all the time: only the newest steps are kept."""
    steps.add(step)
    if len(steps) > _MAX_REMEMBERED:
        steps.remove(min(steps))
