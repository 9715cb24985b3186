"""Whether ranks that hold the same tensors hold the same bytes, as the digests in their Receipts tell.

Pure: digests come in a rank's plain state, made by whoever trains. A disagreement is memory that changed by itself, a
faulty device, or ranks that do not train alike: this file only says who differs from whom, and where first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash
from pydantic import JsonValue

from storage.errors import CommitRefused

__all__ = ["DIGESTS", "DIGEST_DIGITS", "NAMES", "Disagreement", "ReplicaFold", "ReplicasDisagree"]

DIGESTS: Final = "replicas"
NAMES: Final = "replica_names"
DIGEST_DIGITS: Final = 8
_SHOWN_RANKS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """``ranks``: those that differ from the most; all of them where no most can be told. ``among``: who was compared.

    ``tensor``: the first in the order of names that is not alike; None where that is not known.
    """

    ranks: tuple[int, ...]
    among: tuple[int, ...]
    tensor: str | None
    num_tensors: int

    @property
    def is_settled(self) -> bool:
        """Whether most ranks agree, so that ``ranks`` are those in the wrong."""
        return len(self.ranks) < len(self.among)


class ReplicasDisagree(CommitRefused):
    """Ranks that should hold the same hold different bytes: a Checkpoint made of them would be of no use."""

    def __init__(self, step: int, attempt: str, disagreement: Disagreement) -> None:
        super().__init__(step, attempt, disagreement)
        self.step, self.attempt, self.disagreement = step, attempt, disagreement

    def __str__(self) -> str:
        found = self.disagreement
        shown = ", ".join(map(str, found.ranks[:_SHOWN_RANKS]))
        more = f" and {len(found.ranks) - _SHOWN_RANKS} more" if len(found.ranks) > _SHOWN_RANKS else ""
        num_others = len(found.among) - len(found.ranks)
        how = (
            f"differs from the {num_others} others"
            if found.is_settled
            else "differs, with no majority to tell who is right"
        )
        where = "" if found.tensor is None else f", first in {found.tensor}, in {found.num_tensors} tensors"
        return (
            f"step {self.step} of attempt {self.attempt}: what rank {shown}{more} holds {how}{where}; all should hold "
            "the same: memory changed by itself there, or these ranks do not train alike"
        )


class ReplicaFold:
    """The digests of one step, rank by rank."""

    def __init__(self) -> None:
        self._by_label: dict[str, dict[int, str]] = {}
        self._names: dict[str, Sequence[str]] = {}

    def add(self, rank: int, rank_state: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """Take the digests of ``rank`` in; returns its state with one digest of them in their place."""
        digests = _strings(rank_state.get(DIGESTS))
        if not digests:
            return dict(rank_state)
        for label, text in digests.items():
            self._by_label.setdefault(label, {})[rank] = text
        names = rank_state.get(NAMES)
        if isinstance(names, dict):
            for label, listed in names.items():
                self._names.setdefault(label, [str(name) for name in listed] if isinstance(listed, list) else [])
        short: dict[str, JsonValue] = {
            label: xxhash.xxh3_64_hexdigest(text.encode()) for label, text in digests.items()
        }
        return {key: value for key, value in rank_state.items() if key not in (DIGESTS, NAMES)} | {DIGESTS: short}

    def disagreement(self) -> Disagreement | None:
        """The first one, or None: all replicas are alike, or nobody said what his is."""
        for label in sorted(self._by_label):
            texts = self._by_label[label]
            if len(set(texts.values())) > 1:
                return self._judge(label, texts)
        return None

    def _judge(self, label: str, texts: Mapping[int, str]) -> Disagreement:
        among = tuple(sorted(texts))
        (usual, votes), *_ = Counter(texts.values()).most_common()
        ranks = tuple(rank for rank in among if texts[rank] != usual) if 2 * votes > len(among) else among
        parts = [{rank: _part(text, index) for rank, text in texts.items()} for index in range(_length(texts))]
        unlike = [index for index, part in enumerate(parts) if len(set(part.values())) > 1]
        names = self._names.get(label) or self._names.get(f"{label.partition('-')[0]}-0", ())
        first = names[unlike[0]] if unlike and unlike[0] < len(names) else None
        return Disagreement(ranks=ranks, among=among, tensor=first, num_tensors=len(unlike))


def _strings(value: JsonValue) -> dict[str, str]:
    return {key: text for key, text in value.items() if isinstance(text, str)} if isinstance(value, dict) else {}


def _length(texts: Mapping[int, str]) -> int:
    return max(len(text) for text in texts.values()) // DIGEST_DIGITS


def _part(text: str, index: int) -> str:
    return text[index * DIGEST_DIGITS : (index + 1) * DIGEST_DIGITS]
