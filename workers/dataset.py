"""Reads token rows of a dataset from any object store by range, with bounded memory and every id checked.

A row group is fetched whole, verified, checked against the vocabulary and kept among the few most recently used. Those
of one call come beside each other from a remote store; one call is served at a time. A copy sent to another process
opens the store anew. Opening files is `row_group_files`.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Final, TypeVar

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
_Group = tuple[DataFile, int]
_T = TypeVar("_T")
_R = TypeVar("_R")

CACHED_ROW_GROUPS: Final = 32
READS_AT_ONCE: Final = 8
"""Row groups of one leaf that are fetched beside each other from a store that is reached over a network."""
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
        reads_at_once: int | None = None,
    ) -> None:
        self.url, self.card, self.split = url, card, split
        self._config = config or StoreConfig()
        self._reads_at_once = reads_at_once or (READS_AT_ONCE if _is_remote(url) else 1)
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
        return TokenDataset, (
            self.url,
            self.card,
            self.split,
            self._config,
            self._cached_row_groups,
            self._reads_at_once,
        )

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
            in_order = list(wanted)
            for first in range(0, len(in_order), self._reads_at_once):
                together = in_order[first : first + self._reads_at_once]
                groups = [(self._files[index], number) for index, number in together]
                for key, tokens in zip(together, self._row_groups_of(groups), strict=True):
                    places, rows = zip(*wanted[key], strict=True)
                    result[list(places)] = tokens[list(rows)]
        return result

    def _row_groups_of(self, groups: Sequence[_Group]) -> list[_Stored]:
        """These few row groups, those that are not kept read at once."""
        missing = [(file, number) for file, number in groups if (file.name, number) not in self._row_groups]
        files = self._files_of({file.name: file for file, _ in missing}.values())
        read = self._at_once(lambda group: self._read(files[group[0].name], *group), missing)
        found = {(file.name, number): tokens for (file, number), tokens in zip(missing, read, strict=True)}
        for key in [(file.name, number) for file, number in groups]:
            if key not in found:
                found[key] = self._row_groups[key]
            self._row_groups[key] = found[key]
            self._row_groups.move_to_end(key)
        while len(self._row_groups) > self._cached_row_groups:
            self._row_groups.popitem(last=False)
        return [found[file.name, number] for file, number in groups]

    def _at_once(self, work: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
        if len(items) < 2 or self._reads_at_once == 1:
            return [work(item) for item in items]
        # Threads of this call alone: none is left of a dataset that nobody reads any more.
        with ThreadPoolExecutor(len(items), thread_name_prefix="data-read") as pool:
            return list(pool.map(work, items))

    def _read(self, opened: RowGroupFile, file: DataFile, row_group: int) -> _Stored:
        row_length = self.card.sequence_length + 1
        flat = opened.read(row_group)
        expected = min(self.card.row_group_rows, file.rows - row_group * self.card.row_group_rows)
        if flat.dtype.kind not in "iu" or flat.size != expected * row_length:
            raise DataError(
                f"holds {flat.size} values of type {flat.dtype}; expected {expected} rows of {row_length} token ids",
                file.name,
                row_group=row_group,
            )
        tokens = flat.reshape(expected, row_length)
        self._check_ids(file, row_group, tokens)
        return tokens

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

    def _files_of(self, files: Collection[DataFile]) -> dict[str, RowGroupFile]:
        """These few files, opened where they are not."""
        closed = [file for file in files if file.name not in self._open]
        opened = self._at_once(
            lambda file: open_row_groups(self._store, file, deadline_s=self._config.deadline_s), closed
        )
        for file, one in zip(closed, opened, strict=True):
            self._open[file.name] = one
            self._open_kib += _footer_kib(file)
        found = {file.name: self._open[file.name] for file in files}
        for name in found:
            self._open.move_to_end(name)
        while self._open_kib > OPEN_FOOTERS_KIB and len(self._open) > 1:
            name, _ = self._open.popitem(last=False)
            self._open_kib -= _footer_kib(self._by_name[name])
        return found


def _is_remote(url: str) -> bool:
    scheme, separator, _ = url.partition("://")
    return bool(separator) and scheme not in ("file", "memory")


def _footer_kib(file: DataFile) -> int:
    return file.row_groups if file.name.endswith(".parquet") else 1 + file.row_groups // 16
