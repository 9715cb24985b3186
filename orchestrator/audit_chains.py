"""Chains the samples of a ledger anew and compares with the chains that the ranks recorded. Pure.

Each range begins with the chain recorded before it, so that one wrong range does not spoil those behind it. Chains that
were reported step by step, where there are any, tell the very step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orchestrator.audit_places import Finding
from workers.ledger import TrainedRange
from workers.sample_order import chain, leaf_digest

__all__ = ["ChainCheck"]

Ids = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Judged:
    """A range whose end is not what its samples give. ``agreed``: the last step before it that was reported alike."""

    first: int
    last: int
    agreed: int
    differs: int | None
    record_alone: bool = False


class ChainCheck:
    """`begin` a range, `add` its steps, `end` it; then the next."""

    def __init__(self, beginning: str, told: Mapping[int, str]) -> None:
        self._told = told
        self._recorded: str | None = beginning
        self._found = self._other = beginning
        self._wrong: list[_Judged] = []
        self._agreed = 0
        self._differs: int | None = None
        self._before_is_wrong = False
        self.num_right = 0

    def begin(self, one: TrainedRange) -> None:
        self._agreed, self._differs = one.steps[0] - 1, None
        self._other = self._found
        if self._recorded is not None:
            self._found = self._recorded

    def add(self, step: int, leaves: Ids) -> None:
        """``leaves`` of the steps from ``step`` on: shape [steps, leaves of a step, samples of a leaf]."""
        is_split = self._other != self._found
        for number, of_step in enumerate(leaves, start=step):
            digests = [leaf_digest(leaf) for leaf in of_step]
            self._found = chain(self._found, digests)
            if is_split:
                self._other = chain(self._other, digests)
            told = self._told.get(number)
            if told == self._found and self._differs is None:
                self._agreed = number
            elif told is not None and told not in (self._found, self._other) and self._differs is None:
                self._differs = number
        if not is_split:
            self._other = self._found

    def end(self, one: TrainedRange) -> None:
        first, last = one.steps
        is_right = self._found == one.chain
        if not is_right and self._before_is_wrong and self._other == one.chain:
            # From what the samples before gave it fits: it is the record between that is not theirs.
            self._wrong[-1].record_alone = is_right = True
            self._found = self._other
        if is_right:
            self.num_right += 1
        else:
            self._wrong.append(_Judged(first, last, self._agreed, self._differs))
        self._before_is_wrong, self._recorded = not is_right, one.chain

    def pass_over(self, one: TrainedRange) -> None:
        """A range whose samples are not known: what follows begins with its record."""
        self._before_is_wrong, self._recorded = False, one.chain

    def findings(self) -> list[Finding]:
        """The first wrong range in full; all behind it in one line, since they mostly have the same cause."""
        if not self._wrong:
            return []
        found = [_told_of(self._wrong[0])]
        if len(self._wrong) > 1:
            first, last = self._wrong[1].first, self._wrong[-1].last
            text = f"the chains at the end of {len(self._wrong) - 1} more ranges are not those of their samples"
            found.append(Finding(kind="chain", first_step=first, last_step=last, text=text))
        return found


def _told_of(wrong: _Judged) -> Finding:
    first, last = wrong.agreed + 1, wrong.last
    text = "what the ranks put through backward is not what the order says"
    if wrong.record_alone or wrong.agreed == wrong.last:
        first = last = wrong.last
        text = "the chain recorded after it is not that of its samples, whereas all around it fits"
    elif wrong.differs is not None:
        last = wrong.differs
    return Finding(kind="chain", first_step=first, last_step=last, text=text)
