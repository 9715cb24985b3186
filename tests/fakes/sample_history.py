"""A Run's way through its samples without the training: the real Progress, ledger and order, moved on step by step."""

from __future__ import annotations

import random
from copy import copy
from dataclasses import dataclass, field

import numpy as np

from orchestrator.data_audit import Claims
from storage.keys import Attempt
from workers.advance import advance, begin
from workers.config import DataConfig
from workers.contract import Member, SkippedWindow, World
from workers.ledger import Ledger
from workers.sample_order import SampleOrder, SourceRows, leaf_digest
from workers.skipped_windows import skip_ahead, spans
from workers.state import Progress

__all__ = ["History", "order_of", "random_history"]


def order_of(num_rows: int = 60, *, seed: int = 5) -> SampleOrder:
    return SampleOrder(seed=seed, sources=(SourceRows(name="train", num_rows=num_rows),))


@dataclass(slots=True, kw_only=True)
class History:
    """``told``: the chains as they were reported, of steps that were rolled back too; the newest word stands."""

    order: SampleOrder = field(default_factory=order_of)
    batch: int = 8
    leaf: int = 2
    progress: Progress = field(default_factory=Progress)
    world_size: int = 1
    attempt: int = 0
    windows: tuple[SkippedWindow, ...] = ()
    told: dict[int, str] = field(default_factory=dict)
    num_trained: int = 0
    worlds: dict[int, int] = field(default_factory=dict)

    def start(self, world_size: int, *, at: Progress | None = None) -> None:
        """A new Attempt, from the state ``at`` (else from where it stands)."""
        if at is not None:
            self.progress = copy(at)
        self.attempt, self.world_size = self.attempt + 1, world_size
        progress = self.progress
        self.worlds = {step: size for step, size in self.worlds.items() if step <= progress.step}
        progress.skipped = skip_ahead(progress.skipped, progress.position, self.windows)
        begin(progress, self.order, self.windows, self.attempt)

    def train(self, num_steps: int) -> None:
        members = tuple(Member(rank=rank, worker_id="", node_id="") for rank in range(self.world_size))
        world = World(attempt=Attempt(number=self.attempt, nonce="0badcafe"), members=members)
        data = DataConfig(url="x", sequence_length=4, global_batch=self.batch, micro_batch=self.leaf)
        for _ in range(num_steps):
            progress = self.progress
            runs = spans(progress.position, self.batch, progress.skipped)
            ids = np.concatenate([self.order.ids(place, count) for place, count in runs])
            digests = [leaf_digest(leaf) for leaf in ids.reshape(-1, self.leaf)]
            advance(progress, progress.step + 1, digests, data, self.order.num_rows, world)
            self.told[progress.step] = progress.sample_chain
            self.worlds[progress.step] = self.world_size
            self.num_trained += 1

    def reject(self, reason: str = "not-finite") -> None:
        """The next step goes wrong: its samples are to be left out from the next Attempt on."""
        progress = self.progress
        self.windows += tuple(
            SkippedWindow(place=place, samples=count, step=progress.step + 1, reason=reason)
            for place, count in spans(progress.position, self.batch, progress.skipped)
        )

    @property
    def ledger(self) -> Ledger:
        return Ledger.read(self.progress.ledger)

    @property
    def claims(self) -> Claims:
        progress = self.progress
        return Claims(
            step=progress.step,
            position=progress.position,
            chain=progress.sample_chain,
            skipped=progress.skipped,
            epoch=progress.epoch,
            seed=self.order.seed,
            num_rows=self.order.num_rows,
        )


def random_history(seed: int, *, lives: int = 25) -> History:
    """Kills, drains, growth, shrinking, bad steps and other batches, in an order that ``seed`` decides."""
    rng = random.Random(seed)
    history = History(order=_any_order(rng, seed))
    saved = [copy(history.progress)]
    history.start(4)
    for _ in range(lives):
        for _ in range(rng.randrange(4)):
            history.train(rng.randint(1, 3))
            saved.append(copy(history.progress))
        history.train(rng.randrange(3))
        fault = rng.random()
        if fault < 0.25:
            history.reject(rng.choice(["not-finite", "loss-spike"]))
        if fault < 0.35:
            history.batch, history.leaf = rng.choice([(8, 2), (8, 4), (12, 3), (4, 1)])
        at = None if 0.35 < fault < 0.5 else rng.choice(saved[-2:])  # a drain loses nothing
        if at is not None:
            saved = [one for one in saved if one.step <= at.step]
        history.start(rng.randint(1, 6), at=at)
    history.train(1)
    return history


def _any_order(rng: random.Random, seed: int) -> SampleOrder:
    """One source, one that is shuffled by blocks, or a mix of unlike sources."""
    num_rows = rng.randint(30, 90)
    match seed % 3:
        case 0:
            return order_of(num_rows, seed=seed)
        case 1:
            source = SourceRows(name="train", num_rows=num_rows, block_rows=7)
            return SampleOrder(seed=seed, sources=(source,), shuffle="blocks", window_blocks=2)
        case _:
            sources = (SourceRows(name="a", num_rows=num_rows, weight=3), SourceRows(name="b", num_rows=17))
            return SampleOrder(seed=seed, sources=sources)
