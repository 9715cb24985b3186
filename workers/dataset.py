"""Reads token rows of a dataset from any object store by range, with bounded memory and every id checked.

A row group is fetched whole, verified, checked against the vocabulary and kept among the few most recently used. One
thread at a time reads; a copy sent to another process opens the store anew. Opening files is `row_group_files`.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt

from storage.config import StoreConfig
from storage.open_store import open_store
from workers.data_errors import DataError
from workers.dataset_card import DataFile, DatasetCard, Split, load_card
from workers.row_group_files import RowGroupFile, open_row_groups
from workers.sample_order import SampleOrder, Shuffle, SourceRows

__all__ = ["CACHED_ROW_GROUPS", "TokenDataset", "cached_groups"]

Ids = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int64]
_Stored = npt.NDArray[np.integer]

CACHED_ROW_GROUPS: Final = 32
# A file is kept open for its footer, which takes about 1 KiB a row group of Parquet, a sixteenth of that of Arrow.
OPEN_FOOTERS_KIB: Final = 16 << 10


def cached_groups(shuffle: Shuffle, window_groups: int) -> int:
    """Row groups worth keeping: of blocks one window and the next, which a leaf on their border needs both."""
    return 2 * window_groups if shuffle == "blocks" else CACHED_ROW_GROUPS


class TokenDataset:
    """One split of a dataset: ``rows`` by id, each of ``sequence_length + 1`` tokens."""

    def __init__(
        self,
        url: str,
        card: DatasetCard,
        split: Split,
        config: StoreConfig | None = None,
        cached_row_groups: int = CACHED_ROW_GROUPS,
    ) -> None:
        self.url, self.card, self.split = url, card, split
        self._config = config or StoreConfig()
        self._cached_row_groups = cached_row_groups
        self._store = open_store(url, self._config)
        self._files = card.files_of(split)
        self._first_rows = [0, *accumulate(file.rows for file in self._files)]
        self._by_name = {file.name: file for file in self._files}
        self._open: OrderedDict[str, RowGroupFile] = OrderedDict()
        self._open_kib = 0
        self._row_groups: OrderedDict[tuple[str, int], _Stored] = OrderedDict()
        # A stream that was closed in the middle of a read may still be reading while the next one begins.
        self._one_at_a_time = threading.Lock()

    @classmethod
    def open(cls, url: str, split: Split, config: StoreConfig | None = None) -> TokenDataset:
        """Open the dataset at ``url``. Raises DataError when there is none."""
        config = config or StoreConfig()
        card = load_card(open_store(url, config), deadline_s=config.deadline_s)
        return cls(url, card, split, config)

    def __reduce__(self) -> tuple[Callable[..., TokenDataset], tuple[object, ...]]:
        return TokenDataset, (self.url, self.card, self.split, self._config, self._cached_row_groups)

    @property
    def num_rows(self) -> int:
        return self._first_rows[-1]

    @property
    def sequence_length(self) -> int:
        return self.card.sequence_length

    @property
    def cards(self) -> tuple[DatasetCard, ...]:
        return (self.card,)

    @property
    def cached_bytes(self) -> int:
        """Memory that the kept row groups take."""
        return sum(tokens.nbytes for tokens in self._row_groups.values())

    def order(self, seed: int, *, shuffle: Shuffle = "rows", window_groups: int = 1) -> SampleOrder:
        """The order of this dataset alone. Raises DataError when it has no rows."""
        if not self.num_rows:
            raise DataError(f"{self.url} has no rows in its {self.split} split")
        rows = SourceRows(name="data", num_rows=self.num_rows, block_rows=self.card.row_group_rows)
        return SampleOrder(seed=seed, sources=(rows,), shuffle=shuffle, window_blocks=window_groups)

    def in_turn(self, numbers: Ids) -> Ids:
        """Ids of the rows with these numbers when rows are taken one after the other, as an evaluation does."""
        return numbers

    def rows(self, row_ids: Sequence[int] | Ids) -> Tokens:
        """The rows of these ids in this order, shape [n, sequence_length + 1]. Raises DataError on a bad token id."""
        ids = np.asarray(row_ids, dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self.num_rows):
            raise DataError(f"row {ids.min()}..{ids.max()} asked of a {self.split} split of {self.num_rows} rows")
        result = np.empty((len(ids), self.card.sequence_length + 1), dtype=np.int64)
        wanted: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for place, row_id in enumerate(ids.tolist()):
            file_index = bisect_right(self._first_rows, row_id) - 1
            row_group, row = divmod(row_id - self._first_rows[file_index], self.card.row_group_rows)
            wanted.setdefault((file_index, row_group), []).append((place, row))
        with self._one_at_a_time:
            for (file_index, row_group), pairs in wanted.items():
                tokens = self._row_group(self._files[file_index], row_group)
                places, rows = zip(*pairs, strict=True)
                result[list(places)] = tokens[list(rows)]
        return result

    def _row_group(self, file: DataFile, row_group: int) -> _Stored:
        key = (file.name, row_group)
        cached = self._row_groups.get(key)
        if cached is not None:
            self._row_groups.move_to_end(key)
            return cached
        tokens = self._read(file, row_group)
        self._check_ids(file, row_group, tokens)
        self._row_groups[key] = tokens
        if len(self._row_groups) > self._cached_row_groups:
            self._row_groups.popitem(last=False)
        return tokens

    def _read(self, file: DataFile, row_group: int) -> _Stored:
        row_length = self.card.sequence_length + 1
        flat = self._file(file).read(row_group)
        expected = min(self.card.row_group_rows, file.rows - row_group * self.card.row_group_rows)
        if flat.dtype.kind not in "iu" or flat.size != expected * row_length:
            raise DataError(
                f"holds {flat.size} values of type {flat.dtype}; expected {expected} rows of {row_length} token ids",
                file.name,
                row_group=row_group,
            )
        return flat.reshape(expected, row_length)

    def _check_ids(self, file: DataFile, row_group: int, tokens: _Stored) -> None:
        vocab_size = self.card.vocab_size
        if int(tokens.max()) < vocab_size and int(tokens.min()) >= 0:
            return
        row, column = np.argwhere((tokens >= vocab_size) | (tokens < 0))[0]
        raise DataError(
            f"token id {int(tokens[row, column])} at place {column} is outside the vocabulary 0..{vocab_size - 1}",
            file.name,
            row_group * self.card.row_group_rows + int(row),
            row_group,
        )

    def _file(self, file: DataFile) -> RowGroupFile:
        opened = self._open.get(file.name)
        if opened is not None:
            self._open.move_to_end(file.name)
            return opened
        opened = open_row_groups(self._store, file, deadline_s=self._config.deadline_s)
        self._open[file.name] = opened
        self._open_kib += _footer_kib(file)
        while self._open_kib > OPEN_FOOTERS_KIB and len(self._open) > 1:
            closed, _ = self._open.popitem(last=False)
            self._open_kib -= _footer_kib(self._by_name[closed])
        return opened


def _footer_kib(file: DataFile) -> int:
    return file.row_groups if file.name.endswith(".parquet") else 1 + file.row_groups // 16
