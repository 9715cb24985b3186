"""One dataset or several as one body of rows. Row ids count through the sources in their order.

Several sources have to have one sequence length, one vocabulary and one tokenizer. In which order rows are trained on
is `sample_order`'s business; reading them is `dataset`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from storage.config import StoreConfig
from storage.open_store import open_store
from workers.config import DataConfig
from workers.data_errors import DataError
from workers.data_patience import data_store_config
from workers.dataset import TokenDataset, cached_groups
from workers.dataset_card import DatasetCard, Split, load_card
from workers.mix_weights import whole_weights
from workers.sample_order import SampleOrder, Shuffle, SourceRows

__all__ = ["MixedSources", "TokenRows", "disagreements", "open_rows", "order_of"]

Ids = npt.NDArray[np.int64]


class TokenRows(Protocol):
    """What a stream reads from: a `TokenDataset`, or `MixedSources`."""

    @property
    def url(self) -> str:
        """Where it is, for messages."""
        ...

    @property
    def split(self) -> Split: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def sequence_length(self) -> int: ...

    @property
    def cards(self) -> tuple[DatasetCard, ...]:
        """The card of each source, in their order."""
        ...

    def order(self, seed: int, *, shuffle: Shuffle = "rows", window_groups: int = 1) -> SampleOrder:
        """Which row is trained on when. Raises DataError where there are no rows."""
        ...

    def in_turn(self, numbers: Ids) -> Ids:
        """Ids of the rows with these numbers when rows are taken one after the other, as an evaluation does."""
        ...

    def rows(self, row_ids: Sequence[int] | Ids) -> Ids:
        """The rows of these ids in this order, shape [n, sequence_length + 1]. Raises DataError on a bad token id."""
        ...


class MixedSources:
    """Several sources with their weights. Raises DataError naming the fields in which they do not agree."""

    def __init__(self, names: Sequence[str], weights: Sequence[float], datasets: Sequence[TokenDataset]) -> None:
        self._names, self._datasets = tuple(names), tuple(datasets)
        self._weights = whole_weights(weights)
        self.split: Split = self._datasets[0].split
        self.url = ", ".join(dataset.url for dataset in self._datasets)
        problems = disagreements(self._names, self.cards)
        if problems:
            raise DataError("; ".join(problems))
        self._first_ids = [0, *accumulate(dataset.num_rows for dataset in self._datasets)]

    @property
    def num_rows(self) -> int:
        return self._first_ids[-1]

    @property
    def sequence_length(self) -> int:
        return self._datasets[0].sequence_length

    @property
    def cards(self) -> tuple[DatasetCard, ...]:
        return tuple(dataset.card for dataset in self._datasets)

    def order(self, seed: int, *, shuffle: Shuffle = "rows", window_groups: int = 1) -> SampleOrder:
        """Which row is trained on when. Raises DataError where a source has no rows."""
        sources = []
        for name, weight, dataset in zip(self._names, self._weights, self._datasets, strict=True):
            (alone,) = dataset.order(seed).sources
            sources.append(SourceRows(name=name, num_rows=alone.num_rows, weight=weight, block_rows=alone.block_rows))
        return SampleOrder(seed=seed, sources=tuple(sources), shuffle=shuffle, window_blocks=window_groups)

    def in_turn(self, numbers: Ids) -> Ids:
        """Rows of all sources by turns, each as often as its weight says for as long as it has any."""
        if not numbers.size:
            return numbers
        wanted = int(numbers.max()) + 1
        turns, ids = [], []
        for weight, first, dataset in zip(self._weights, self._first_ids, self._datasets, strict=False):
            own = np.arange(min(dataset.num_rows, wanted), dtype=np.int64)
            turns.append((own + 0.5) / weight)
            ids.append(first + own)
        in_order = np.concatenate(ids)[np.argsort(np.concatenate(turns), kind="stable")]
        return in_order[numbers]

    def rows(self, row_ids: Sequence[int] | Ids) -> Ids:
        """The rows of these ids in this order, shape [n, sequence_length + 1]. Raises DataError on a bad token id."""
        ids = np.asarray(row_ids, dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self.num_rows):
            raise DataError(f"row {ids.min()}..{ids.max()} asked of {self.split} splits of {self.num_rows} rows")
        result = np.empty((len(ids), self.sequence_length + 1), dtype=np.int64)
        numbers = np.searchsorted(self._first_ids, ids, side="right") - 1
        for number in np.unique(numbers).tolist():
            chosen = numbers == number
            result[chosen] = self._datasets[number].rows(ids[chosen] - self._first_ids[number])
        return result


def disagreements(names: Sequence[str], cards: Sequence[DatasetCard]) -> tuple[str, ...]:
    """One line for each field in which the sources have to agree and do not."""
    found: dict[str, list[int] | list[str]] = {
        "sequence_length": [card.sequence_length for card in cards],
        "vocabulary": [card.vocab_size for card in cards],
        "tokenizer": [card.tokenizer_digest for card in cards],
    }
    return tuple(
        f"the sources do not agree in {field}: "
        + ", ".join(f"{name} has {value}" for name, value in zip(names, values, strict=True))
        + ". Prepare them alike, with one tokenizer (`raysume data prepare --tokenizer`)"
        for field, values in found.items()
        if len(set(values)) > 1
    )


def open_rows(data: DataConfig, split: Split, store: StoreConfig) -> TokenRows:
    """The rows that ``data`` names. Cards are read with all retries; reads within a step have few, for the step tries
    again and shows that."""
    opened = []
    for source in data.mix:
        card = load_card(open_store(source.url, store), deadline_s=store.deadline_s)
        kept = cached_groups(data.shuffle, data.shuffle_window_groups)
        opened.append(TokenDataset(source.url, card, split, data_store_config(store), kept))
    if len(opened) == 1:
        return opened[0]
    return MixedSources([source.label for source in data.mix], [source.weight for source in data.mix], opened)


def order_of(rows: TokenRows, data: DataConfig, seed: int) -> SampleOrder:
    """The order in which a Run with these settings trains on ``rows``."""
    return rows.order(seed, shuffle=data.shuffle, window_groups=data.shuffle_window_groups)
