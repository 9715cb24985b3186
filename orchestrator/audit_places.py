"""Checks a ledger's own arithmetic: steps and places follow each other without gap, overlap or going back. Pure.

Which samples the places stand for, and whether the ranks really saw them, is `data_audit`'s question.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from workers.ledger import Ledger, TrainedRange
from workers.skipped_windows import Windows, merge

__all__ = ["Finding", "Places", "check_places", "cut", "unsound"]

_MAX_BATCH: Final = 1 << 24  # of a record that is not damaged: the samples of one step are held at once
_MAX_PLACE: Final = 1 << 48

Kind = Literal["steps", "range", "places", "window", "chain", "rows", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is not as it must be, in steps ``first_step`` to ``last_step``; as near as can be told."""

    kind: Kind
    first_step: int
    last_step: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """``end``: the place behind the last sample of all. ``skipped``: windows on the way there."""

    samples: int
    missing: int
    repeated: int
    end: int
    skipped: Windows
    findings: tuple[Finding, ...]


def check_places(ledger: Ledger) -> Places:
    """Counts and findings; each finding names the very step."""
    start, windows = ledger.beginning.place, ledger.windows
    findings = list(_steps(ledger))
    runs: list[tuple[int, int]] = []
    expected = start
    for one in ledger.trained:
        done = 0
        for place, count in one.places:
            step = min(one.steps[0] + done // one.batch, one.steps[1])
            findings += _run(step, one, done, place, count, expected, windows)
            runs.append((place, count))
            expected, done = max(expected, place + count), done + count
    covered = merge((), runs)
    on_the_way = _within(windows, start, expected)
    known = merge(on_the_way, _within(covered, start, expected))
    samples = sum(count for _, count in runs)
    return Places(
        samples=samples,
        missing=expected - start - sum(count for _, count in known),
        repeated=samples - sum(count for _, count in covered),
        end=expected,
        skipped=on_the_way,
        findings=tuple(findings),
    )


def cut(places: Windows, first: int, count: int) -> Iterator[tuple[int, int]]:
    """Of the samples at ``places``, counted in this order, ``count`` from the ``first`` on, as runs."""
    for place, length in places:
        if first < length and count > 0:
            taken = min(length - first, count)
            yield place + first, taken
            count -= taken
        first = max(0, first - length)


def _steps(ledger: Ledger) -> Iterator[Finding]:
    """Steps follow each other, and what a range says of itself adds up."""
    step, attempt = ledger.beginning.step, 0
    begins = {run.another_run for run in ledger.runs}
    for one in ledger.trained:
        first, last = one.steps
        attempt = 0 if first in begins else attempt
        if first != step + 1 or last < first:
            told = f"steps {first} to {last} are told of where step {step + 1} comes next"
            # The steps that nothing is told of, or those that are told of again.
            concerned = (step + 1, first - 1) if first > step + 1 else (first, max(first, min(last, step)))
            yield Finding(kind="steps", first_step=concerned[0], last_step=concerned[1], text=told)
        reason = unsound(one) or _falling(one, attempt)
        if reason:
            yield Finding(kind="range", first_step=first, last_step=max(first, last), text=reason)
        step, attempt = last, max(attempt, one.attempts[1])


def unsound(one: TrainedRange) -> str:
    """Why a range cannot be right by itself, so that nothing can be computed from it; "" where it can."""
    if one.samples != one.num_steps * one.batch or one.num_steps < 1:
        return f"{one.num_steps} steps of {one.batch} samples are {one.num_steps * one.batch}, not {one.samples}"
    if one.batch % one.leaf or one.batch > _MAX_BATCH:
        return f"a batch of {one.batch} cannot be cut into leaves of {one.leaf}"
    if any(place < 0 or count < 1 or place + count > _MAX_PLACE for place, count in one.places):
        return f"the places {str(one.places)[:80]} are none"
    return ""


def _falling(one: TrainedRange, attempt: int) -> str:
    if sum(one.worlds.values()) != one.num_steps:
        return f"its world sizes make {sum(one.worlds.values())} steps, it has {one.num_steps}"
    if one.attempts[0] < attempt or one.attempts[1] < one.attempts[0]:
        return f"attempts {one.attempts[0]} to {one.attempts[1]} follow attempt {attempt}"
    return ""


def _run(
    step: int, one: TrainedRange, done: int, place: int, count: int, expected: int, windows: Windows
) -> Iterator[Finding]:
    """Of one run of places that comes where ``expected`` is next; ``done`` samples of its range come before it."""
    if place > expected:
        lost = place - expected - sum(length for _, length in _within(windows, expected, place))
        if lost:
            text = (
                f"place {expected} comes next, but it goes on at {place}: {lost} samples are not trained, nor skipped"
            )
            yield Finding(kind="places", first_step=step, last_step=step, text=text)
    elif place < expected:
        text = f"place {expected} comes next, but it goes back to {place}: samples come again or out of order"
        yield Finding(kind="places", first_step=step, last_step=step, text=text)
    for first, length in _within(windows, place, place + count):
        at = one.steps[0] + (done + first - place) // one.batch
        text = f"places {first} to {first + length - 1} were left out on purpose, and are trained on all the same"
        yield Finding(kind="window", first_step=at, last_step=at, text=text)


def _within(windows: Windows, start: int, end: int) -> Windows:
    """What of ``windows`` lies in ``[start, end)``."""
    cut_off = [(max(first, start), min(first + count, end)) for first, count in windows]
    return tuple((first, last - first) for first, last in cut_off if first < last)
