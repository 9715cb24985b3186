"""The ledger of samples: which Attempt, at which world size, put which places of the stream through which steps.

It is text in `Progress`, one JSON object a line: so one Commit holds it together with the weights whose history it
tells, and a Snapshot of every step copies it for next to nothing. Proving it is `orchestrator.data_audit`'s work.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from workers.contract import SkippedWindow
from workers.errors import WorkersError
from workers.skipped_windows import Windows, merge, place_of, spans

__all__ = [
    "EMPTY_CHAIN",
    "AnotherRun",
    "Beginning",
    "Ledger",
    "LedgerUnreadable",
    "LeftOut",
    "OrderFrom",
    "TrainedRange",
    "add_step",
    "begin_attempt",
]

EMPTY_CHAIN: Final = "0" * 32

MAX_RANGES: Final = 256  # then older ones are joined,
_FEWER: Final = 32  # so many at once
_NEWEST: Final = 32  # ranges that are never joined
_MAX_STEPS: Final = 1024  # of a range that grows: then its chain stands, and the next one begins

_Count = Field(ge=0, lt=1 << 62)
_Chain = Field(pattern=r"^[0-9a-f]{32}$")


class LedgerUnreadable(WorkersError):
    """A text is no ledger that this version reads. ``line`` counts from 1."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(line, reason)
        self.line, self.reason = line, reason

    def __str__(self) -> str:
        return f"line {self.line} of the ledger: {self.reason}"


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Beginning(_Line):
    """What the ledger says nothing of: all up to ``step``, whose samples end before ``place``."""

    ledger: int = Field(1, ge=1, le=1)
    step: int = _Count
    place: int = _Count
    position: int = _Count
    chain: str = _Chain


class OrderFrom(_Line):
    """From ``step`` on the stream has this order: `SampleOrder.as_fields`."""

    step: int = _Count
    order: dict[str, JsonValue]


class AnotherRun(_Line):
    """From the step ``another_run`` on, a Run of its own goes on (`run.resume: URL`): its Attempts count anew."""

    another_run: int = _Count


class LeftOut(_Line):
    """Samples from ``place`` on that are left out on purpose: ``step`` went wrong with them. None: not recorded."""

    place: int = _Count
    left_out: int = _Count
    step: int | None = None
    why: str = Field("", max_length=200)


class TrainedRange(_Line):
    """Steps ``steps[0]`` to ``steps[1]`` of ``batch`` samples each, cut into leaves of ``leaf``.

    ``places``: first place and length of each run of them, in the order of training. ``worlds``: how many of the steps
    were made at which world size. ``attempts``: the first and the last, ``lives`` how many in all. ``chain``: that of
    the samples after the last step.
    """

    steps: tuple[int, int]
    places: Windows
    batch: int = Field(ge=1, lt=1 << 62)
    leaf: int = Field(ge=1, lt=1 << 62)
    worlds: dict[int, int]
    attempts: tuple[int, int]
    lives: int = Field(1, ge=1)
    chain: str = _Chain

    @property
    def num_steps(self) -> int:
        return self.steps[1] - self.steps[0] + 1

    @property
    def samples(self) -> int:
        return sum(count for _, count in self.places)

    def fits(self, after: TrainedRange) -> bool:
        """Whether ``after`` goes on where this ends, in the same batches."""
        return (self.batch, self.leaf, self.steps[1] + 1) == (after.batch, after.leaf, after.steps[0])

    def joined(self, after: TrainedRange) -> TrainedRange:
        sizes = sorted({*self.worlds, *after.worlds})
        return TrainedRange(
            steps=(self.steps[0], after.steps[1]),
            places=_joined_runs(self.places, after.places),
            batch=self.batch,
            leaf=self.leaf,
            worlds={size: self.worlds.get(size, 0) + after.worlds.get(size, 0) for size in sizes},
            attempts=(self.attempts[0], after.attempts[1]),
            lives=self.lives + after.lives - (self.attempts[1] == after.attempts[0]),
            chain=after.chain,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The whole of it, read. ``trained`` is in the order of steps."""

    beginning: Beginning
    orders: tuple[OrderFrom, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    runs: tuple[AnotherRun, ...] = ()
    trained: tuple[TrainedRange, ...] = ()

    @property
    def last_step(self) -> int:
        return self.trained[-1].steps[1] if self.trained else self.beginning.step

    @property
    def windows(self) -> Windows:
        """What is left out, as `workers.skipped_windows` counts it."""
        return merge((), ((line.place, line.left_out) for line in self.left_out))

    @property
    def text(self) -> str:
        lines = (self.beginning, *self.orders, *self.left_out, *_history(self.runs, self.trained))
        return "\n".join(map(_written, lines))

    @classmethod
    def read(cls, text: str) -> Ledger:
        """What `text` gave. Raises LedgerUnreadable."""
        lines = [_read(number, line) for number, line in enumerate(text.split("\n"), start=1)]
        if not isinstance(lines[0], Beginning):
            raise LedgerUnreadable(1, "a ledger begins with the line that says from where on it speaks")
        return cls(
            beginning=lines[0],
            orders=tuple(line for line in lines if isinstance(line, OrderFrom)),
            left_out=tuple(line for line in lines if isinstance(line, LeftOut)),
            runs=tuple(line for line in lines if isinstance(line, AnotherRun)),
            trained=tuple(line for line in lines if isinstance(line, TrainedRange)),
        )


def begin_attempt(
    text: str,
    *,
    step: int,
    position: int,
    chain: str,
    attempt: int,
    order: Mapping[str, JsonValue],
    skipped: Windows,
    told: Iterable[SkippedWindow],
) -> str:
    """The ledger of a state that stands at ``step``, when the Attempt with the number ``attempt`` begins there.

    ``skipped``: all windows left out now, of which ``told`` says why. A state without a ledger, since an older release
    saved it, gets one that speaks from here on.
    """
    if text:
        ledger = Ledger.read(text)
    else:
        place = place_of(position - 1, skipped) + 1 if position else 0
        ledger = Ledger(beginning=Beginning(step=step, place=place, position=position, chain=chain))
    orders = ledger.orders
    if not orders or orders[-1].order != order:
        kept = tuple(one for one in orders if one.step <= step)
        orders = (*kept, OrderFrom(step=step + 1, order=dict(order)))
    lines = (*ledger.left_out, *_new_windows(ledger, skipped, told))
    return replace(ledger, orders=orders, left_out=lines, runs=_runs(ledger, step, attempt)).text


def add_step(
    text: str,
    step: int,
    *,
    position: int,
    batch: int,
    leaf: int,
    skipped: Windows,
    attempt: int,
    world_size: int,
    chain: str,
) -> str:
    """The ledger after one more step, whose samples began at ``position``. Only the last line is read and written,
    unless a new one begins."""
    more = TrainedRange(
        steps=(step, step),
        places=spans(position, batch, skipped),
        batch=batch,
        leaf=leaf,
        worlds={world_size: 1},
        attempts=(attempt, attempt),
        chain=chain,
    )
    before, _, last_line = text.rpartition("\n")
    last = _read(text.count("\n") + 1, last_line)
    if isinstance(last, TrainedRange) and _grows(last, more):
        return f"{before}\n{_written(last.joined(more))}"
    if isinstance(last, TrainedRange) and text.count("\n") >= MAX_RANGES:
        text = _compacted(Ledger.read(text)).text
    return f"{text}\n{_written(more)}"


def _grows(last: TrainedRange, more: TrainedRange) -> bool:
    """Within one Attempt neither the World nor the order of samples changes."""
    return last.attempts == more.attempts and last.fits(more) and last.num_steps < _MAX_STEPS


def _compacted(ledger: Ledger) -> Ledger:
    """Older neighbours joined, those first that together have the fewest steps, so that chains stay evenly apart.

    Ranges of unlike batches, or of unlike orders, stay apart: these are changed by hand, not by faults.
    """
    trained = list(ledger.trained)
    borders = {one.step for one in ledger.orders} | {one.another_run for one in ledger.runs}
    while len(trained) > MAX_RANGES - _FEWER:
        pairs = [
            (first.num_steps + second.num_steps, index)
            for index, (first, second) in enumerate(pairwise(trained[:-_NEWEST]))
            if first.fits(second) and second.steps[0] not in borders
        ]
        if not pairs:
            break
        _, index = min(pairs)
        trained[index : index + 2] = [trained[index].joined(trained[index + 1])]
    return replace(ledger, trained=tuple(trained))


def _runs(ledger: Ledger, step: int, attempt: int) -> tuple[AnotherRun, ...]:
    """A state of the Run's own is of an earlier Attempt, so that any other number is another Run's."""
    here = AnotherRun(another_run=step + 1)
    if not ledger.trained or ledger.trained[-1].attempts[1] < attempt or here in ledger.runs:
        return ledger.runs
    return (*ledger.runs, here)


def _history(runs: tuple[AnotherRun, ...], trained: tuple[TrainedRange, ...]) -> Iterator[_Line]:
    """Each Run before its own first range; ranges stay as they come."""
    later = list(runs)
    for one in trained:
        while later and later[0].another_run <= one.steps[0]:
            yield later.pop(0)
        yield one
    yield from later


def _new_windows(ledger: Ledger, skipped: Windows, told: Iterable[SkippedWindow]) -> Iterator[LeftOut]:
    """Lines for what is left out and not in the ledger yet. What lies before its beginning is not its matter."""
    known = ledger.windows
    for window in sorted(told, key=lambda one: (one.place, one.samples)):
        if _holds(skipped, window.place) and not _holds(known, window.place) and window.place >= ledger.beginning.place:
            yield LeftOut(place=window.place, left_out=window.samples, step=window.step, why=window.reason)
            known = merge(known, [(window.place, window.samples)])
    for first, count in skipped:
        place = max(first, ledger.beginning.place)
        while place < first + count:
            end = next((sum(one) for one in known if one[0] <= place < sum(one)), None)
            if end is None:
                end = min([one[0] for one in known if one[0] > place] + [first + count])
                yield LeftOut(place=place, left_out=end - place)
            place = end


def _holds(windows: Windows, place: int) -> bool:
    return any(first <= place < first + count for first, count in windows)


def _joined_runs(before: Windows, after: Windows) -> Windows:
    """In the order of training, never sorted: what touches becomes one."""
    runs = list(before)
    for place, count in after:
        if runs and sum(runs[-1]) == place:
            runs[-1] = (runs[-1][0], runs[-1][1] + count)
        else:
            runs.append((place, count))
    return tuple(runs)


_KINDS: Final[Mapping[str, type[_Line]]] = {
    "ledger": Beginning,
    "order": OrderFrom,
    "another_run": AnotherRun,
    "left_out": LeftOut,
    "batch": TrainedRange,
}


def _read(number: int, line: str) -> _Line:
    try:
        found = json.loads(line)
        kind = next((kind for key, kind in _KINDS.items() if isinstance(found, dict) and key in found), None)
        if kind is None:
            raise LedgerUnreadable(number, f"expected one of the keys {', '.join(_KINDS)} in {line[:80]!r}")
        return kind.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise LedgerUnreadable(number, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise LedgerUnreadable(number, f"not JSON: {line[:80]!r}") from error


def _written(line: _Line) -> str:
    return line.model_dump_json(exclude_defaults=True) if not isinstance(line, Beginning) else line.model_dump_json()
