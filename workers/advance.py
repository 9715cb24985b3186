"""Moves Progress on by one finished step: the same arithmetic on every rank, from what the step vector said."""

from __future__ import annotations

from collections.abc import Sequence

from workers.config import DataConfig
from workers.sample_order import chain
from workers.skipped_windows import place_of
from workers.state import Progress

__all__ = ["advance"]


def advance(progress: Progress, step: int, leaf_digests: Sequence[int], data: DataConfig, num_rows: int) -> None:
    """``progress`` stands at the step before ``step``, whose leaves had ``leaf_digests``, in leaf order."""
    progress.step = step
    progress.position += data.global_batch
    progress.tokens += data.tokens_per_step
    progress.epoch = place_of(progress.position, progress.skipped) // num_rows
    progress.sample_chain = chain(progress.sample_chain, leaf_digests)
