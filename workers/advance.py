"""Moves Progress on by one finished step: the same arithmetic on every rank, from what the step vector said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workers.config import DataConfig
from workers.contract import SkippedWindow, World
from workers.ledger import add_step, begin_attempt
from workers.sample_order import SampleOrder, chain
from workers.skipped_windows import place_of
from workers.state import Progress

__all__ = ["advance", "begin"]


def begin(progress: Progress, order: SampleOrder, told: Iterable[SkippedWindow], attempt: int) -> None:
    """Before the first step of Attempt number ``attempt``, once ``progress.skipped`` is what it leaves out;
    ``told`` says why."""
    progress.ledger = begin_attempt(
        progress.ledger,
        step=progress.step,
        position=progress.position,
        chain=progress.sample_chain,
        attempt=attempt,
        order=order.as_fields(),
        skipped=progress.skipped,
        told=told,
    )


def advance(
    progress: Progress, step: int, leaf_digests: Sequence[int], data: DataConfig, num_rows: int, world: World
) -> None:
    """``progress`` stands at the step before ``step``, whose leaves had ``leaf_digests``, in leaf order."""
    first = progress.position
    progress.step = step
    progress.position += data.global_batch
    progress.tokens += data.tokens_per_step
    progress.epoch = place_of(progress.position, progress.skipped) // num_rows
    progress.sample_chain = chain(progress.sample_chain, leaf_digests)
    progress.ledger = add_step(
        progress.ledger,
        step,
        position=first,
        batch=data.global_batch,
        leaf=data.micro_batch,
        skipped=progress.skipped,
        attempt=world.attempt.number,
        world_size=world.size,
        chain=progress.sample_chain,
    )
