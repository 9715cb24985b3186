"""Proves from a ledger that each sample came once an epoch, in order, and that the ranks really put it through. Pure.

The ids of every place are computed anew and chained as the ranks chained those of their leaves. What is proven is which
rows came, not what was in them: that the contents are the same is the dataset's fingerprint to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from orchestrator.audit_chains import ChainCheck
from orchestrator.audit_places import Finding, Places, check_places, cut, unsound
from orchestrator.audit_rows import RowCounts, SourceEpochs
from workers.ledger import Ledger, LeftOut, TrainedRange
from workers.sample_order import SampleOrder
from workers.skipped_windows import Windows, merge, place_of

__all__ = ["AuditReport", "Claims", "OrderPart", "audit"]

Ids = npt.NDArray[np.int64]

_CHUNK: Final = 1 << 18  # samples at a time, at least one step


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What the training state beside the ledger says of itself. None: it is not known. ``reported``: position and chain
    as rank 0 told the driver, which wrote them into the Manifest."""

    step: int
    position: int
    chain: str
    skipped: Windows | None = None
    epoch: int | None = None
    seed: int | None = None
    num_rows: int | None = None
    reported: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderPart:
    """The steps over which one order of the stream held, and the epochs of its sources."""

    first_step: int
    last_step: int
    seed: int
    num_rows: int
    sources: tuple[SourceEpochs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """Steps ``first_step`` to ``last_step``; ``unrecorded``: samples before them that the ledger says nothing of.

    ``skipped``: windows on the way, left out on purpose. ``worlds``: steps made at each world size. ``course``: from
    which step on at which, several where ranges were joined. ``lives``: Attempts that have steps in this history, of
    ``runs``; ``attempts``: the first and the last of the newest of these.
    ``assumed_steps``: the first so many are not recorded; their chain proves them.
    """

    first_step: int
    last_step: int
    unrecorded: int
    samples: int
    missing: int
    repeated: int
    num_skipped: int
    skipped: tuple[LeftOut, ...]
    parts: tuple[OrderPart, ...]
    attempts: tuple[int, int]
    lives: int
    runs: int
    worlds: dict[int, int]
    course: tuple[tuple[int, tuple[int, ...]], ...]
    batches: tuple[int, ...]
    num_chains: int
    findings: tuple[Finding, ...] = ()
    assumed_steps: int = 0

    @property
    def is_proven(self) -> bool:
        return not self.findings


def audit(
    ledger: Ledger,
    order: SampleOrder | None = None,
    *,
    claims: Claims | None = None,
    told: Mapping[int, str] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> AuditReport:
    """``order`` None: as the ledger has it. ``told``: chains that were reported by step, to name the very step where a
    chain is not right. ``progress`` hears of samples dealt with. Raises ValueError for an order that is none."""
    places = check_places(ledger)
    chains = dict(told or {})
    if claims is not None:
        chains[claims.step] = claims.chain
    walk = _Walk(ledger, order, places, chains, progress)
    walk.run()
    findings = [*places.findings, *walk.findings(), *_against(claims, ledger, places)]
    findings.sort(key=lambda found: (found.first_step, found.last_step))
    trained = ledger.trained
    known = tuple(one for one in trained if one.attempts[1])  # Attempts count from 1; 0: it is not known which
    sizes = sorted({size for one in known for size in one.worlds})
    by_run = _by_run(ledger, known)
    return AuditReport(
        first_step=ledger.beginning.step + 1,
        last_step=ledger.last_step,
        unrecorded=ledger.beginning.position,
        samples=places.samples,
        missing=places.missing,
        repeated=max(places.repeated, walk.num_repeated),
        num_skipped=sum(count for _, count in places.skipped),
        skipped=tuple(one for one in ledger.left_out if ledger.beginning.place <= one.place < places.end),
        parts=tuple(walk.parts),
        attempts=(by_run[-1][0].attempts[0], by_run[-1][-1].attempts[1]) if by_run else (0, 0),
        lives=sum(map(_lives, by_run)),
        runs=len(by_run),
        worlds={size: sum(one.worlds.get(size, 0) for one in known) for size in sizes},
        course=_course(known),
        batches=tuple(dict.fromkeys(one.batch for one in trained)),
        num_chains=walk.chains.num_right,
        findings=tuple(findings),
    )


class _Walk:
    """Once through all samples, in the order in which they were trained on."""

    def __init__(
        self,
        ledger: Ledger,
        order: SampleOrder | None,
        places: Places,
        told: Mapping[int, str],
        progress: Callable[[int], None],
    ) -> None:
        self._ledger, self._order, self._places, self._progress = ledger, order, places, progress
        self._windows = list(places.skipped)
        self._findings: list[Finding] = []
        self.chains = ChainCheck(ledger.beginning.chain, told)
        self.parts: list[OrderPart] = []
        self.num_repeated = 0

    def run(self) -> None:
        for order, ranges in self._by_order():
            at_once = max(_CHUNK, *(one.batch for one in ranges if not unsound(one)), 1)
            counts = RowCounts(order, at_once)
            for one in ranges:
                if unsound(one):
                    self.chains.pass_over(one)
                else:
                    self._range(order, counts, one)
            if ranges[-1] is self._ledger.trained[-1]:
                self._leave_out(order, counts, self._places.end)
            part = OrderPart(
                first_step=ranges[0].steps[0],
                last_step=ranges[-1].steps[1],
                seed=order.seed,
                num_rows=order.num_rows,
                sources=counts.result(),
            )
            self.parts.append(part)

    def findings(self) -> list[Finding]:
        return [*self.chains.findings(), *self._findings]

    def _by_order(self) -> Iterator[tuple[SampleOrder, list[TrainedRange]]]:
        """Ranges that follow each other under one order."""
        for number, group in groupby(self._ledger.trained, key=self._number_of):
            ranges = list(group)
            if self._order is not None:
                yield self._order, ranges
            elif number is not None:
                yield SampleOrder.from_fields(self._ledger.orders[number].order), ranges
            else:
                first, last = ranges[0].steps[0], ranges[-1].steps[1]
                text = "no order of samples is recorded for them, or two: what they were trained on cannot be told"
                self._findings.append(Finding(kind="range", first_step=first, last_step=last, text=text))
                for one in ranges:
                    self.chains.pass_over(one)

    def _number_of(self, one: TrainedRange) -> int | None:
        """Which of the ledger's orders holds for all steps of a range."""
        if self._order is not None:
            return 0
        begun = [number for number, order in enumerate(self._ledger.orders) if order.step <= one.steps[0]]
        ended = [order for order in self._ledger.orders if one.steps[0] < order.step <= one.steps[1]]
        return begun[-1] if begun and not ended else None

    def _range(self, order: SampleOrder, counts: RowCounts, one: TrainedRange) -> None:
        self.chains.begin(one)
        for step, ids, epochs, first_place in _chunks(order, one):
            self._leave_out(order, counts, first_place)
            self.chains.add(step, ids.reshape(-1, one.batch // one.leaf, one.leaf))
            repeated = counts.add(ids, epochs)
            if repeated and not self._places.findings:
                last = step + ids.size // one.batch - 1
                text = f"{repeated} rows come again within an epoch although their places do not"
                self._findings.append(Finding(kind="rows", first_step=step, last_step=last, text=text))
            self.num_repeated += repeated
            self._progress(ids.size)
        self.chains.end(one)

    def _leave_out(self, order: SampleOrder, counts: RowCounts, before: int) -> None:
        """Count the rows of windows that lie before a place: they are part of their epoch."""
        while self._windows and self._windows[0][0] < before:
            first, count = self._windows.pop(0)
            for start in range(first, first + count, _CHUNK):
                length = min(_CHUNK, first + count - start)
                self.num_repeated += counts.add(order.ids(start, length), order.epochs(start, length))


def _chunks(order: SampleOrder, one: TrainedRange) -> Iterator[tuple[int, Ids, Ids, int]]:
    """Whole steps at a time: the first of them, the ids and epochs of their samples, and their first place."""
    at_once = max(1, _CHUNK // one.batch)
    for first in range(0, one.num_steps, at_once):
        num_steps = min(at_once, one.num_steps - first)
        runs = list(cut(one.places, first * one.batch, num_steps * one.batch))
        ids = np.concatenate([order.ids(place, count) for place, count in runs])
        epochs = np.concatenate([order.epochs(place, count) for place, count in runs])
        yield one.steps[0] + first, ids, epochs, min(place for place, _ in runs)


def _course(trained: tuple[TrainedRange, ...]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Where the world size changed."""
    told = [(one.steps[0], tuple(sorted(one.worlds))) for one in trained]
    return tuple(one for before, one in zip([None, *told], told, strict=False) if before is None or before[1] != one[1])


def _by_run(ledger: Ledger, trained: tuple[TrainedRange, ...]) -> list[tuple[TrainedRange, ...]]:
    """Ranges of each Run that has some, where one went on from another's Checkpoint."""
    begins = [run.another_run for run in ledger.runs]
    parts = groupby(trained, key=lambda one: sum(begin <= one.steps[0] for begin in begins))
    return [tuple(part) for _, part in parts]


def _lives(trained: tuple[TrainedRange, ...]) -> int:
    """Attempts of one Run; one that has several ranges is counted once."""
    shared = sum(one.attempts[1] == after.attempts[0] for one, after in pairwise(trained))
    return sum(one.lives for one in trained) - shared


def _against(claims: Claims | None, ledger: Ledger, places: Places) -> Iterator[Finding]:
    """The ledger and the training state that it came with say the same."""
    if claims is None:
        return
    last, beginning = ledger.last_step, ledger.beginning

    def finding(text: str, step: int = last) -> Finding:
        return Finding(kind="end", first_step=step, last_step=step, text=text)

    if claims.step != last:
        yield finding(f"the ledger ends with step {last}, the training state stands at step {claims.step}")
        return
    if beginning.position + places.samples != claims.position:
        had = beginning.position + places.samples
        yield finding(f"the ledger has {had} samples, the training state {claims.position}")
    chain = ledger.trained[-1].chain if ledger.trained else beginning.chain
    if chain != claims.chain:
        yield finding(f"the ledger ends with chain {chain}, the training state has {claims.chain}")
    if claims.reported not in (None, (claims.position, claims.chain)):
        yield finding(
            f"the driver was told {claims.reported}, the training state has {(claims.position, claims.chain)}"
        )
    if claims.skipped is not None:
        yield from _unlike_windows(claims.skipped, ledger, finding)
    if ledger.orders:
        order = SampleOrder.from_fields(ledger.orders[-1].order)
        for name, here, there in (("seed", order.seed, claims.seed), ("rows", order.num_rows, claims.num_rows)):
            if there is not None and here != there:
                yield finding(f"the ledger's order has {name} {here}, the training state was made with {there}")
        if claims.epoch is not None and claims.skipped is not None:
            epoch = place_of(claims.position, claims.skipped) // order.num_rows
            if claims.epoch != epoch:
                yield finding(f"the training state says epoch {claims.epoch}, its position is in epoch {epoch}")


def _unlike_windows(skipped: Windows, ledger: Ledger, finding: Callable[[str], Finding]) -> Iterator[Finding]:
    start = ledger.beginning.place
    # What lies before the ledger's beginning is not its matter; a window may reach over it.
    wanted = merge(
        (),
        ((max(first, start), first + count - max(first, start)) for first, count in skipped if first + count > start),
    )
    if wanted != ledger.windows:
        yield finding(f"the training state leaves out {_shown(wanted)}, the ledger {_shown(ledger.windows)}")


def _shown(windows: Windows) -> str:
    return ", ".join(f"[{first}, {first + count})" for first, count in windows) or "nothing"
