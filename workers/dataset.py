"""Reads token rows of a dataset from any object store by range, with bounded memory and every id checked.

A row group is fetched whole, verified by Parquet's page checksums, checked against the vocabulary and kept among the
few most recently used. An instance is used by one thread; a copy sent to another process opens the store anew.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from storage.config import StoreConfig
from storage.errors import ObjectMissing
from storage.object_store import ObjectStore
from storage.open_store import open_store
from workers.data_errors import DataError
from workers.dataset_card import DataFile, DatasetCard, Split, load_card
from workers.sample_order import SampleOrder, SourceRows

__all__ = ["TokenDataset"]

Tokens = npt.NDArray[np.int64]
_Stored = npt.NDArray[np.integer]

CACHED_ROW_GROUPS: Final = 32
OPEN_FILES: Final = 8


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
        self._open: OrderedDict[str, pq.ParquetFile] = OrderedDict()
        self._row_groups: OrderedDict[tuple[str, int], _Stored] = OrderedDict()

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

    def order(self, seed: int) -> SampleOrder:
        """The order of this dataset alone."""
        rows = SourceRows(name="data", num_rows=self.num_rows, block_rows=self.card.row_group_rows)
        return SampleOrder(seed=seed, sources=(rows,))

    def rows(self, row_ids: Sequence[int] | Tokens) -> Tokens:
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
        try:
            column = self._parquet(file).read_row_group(row_group, columns=["tokens"]).column("tokens")
            flat = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
        except ObjectMissing as error:
            raise DataError("the file is missing although the card names it", file.name) from error
        except (pa.ArrowException, OSError, KeyError) as error:
            raise DataError(f"not readable: {error}", file.name, row_group=row_group) from error
        expected = min(self.card.row_group_rows, file.rows - row_group * self.card.row_group_rows)
        if flat.dtype.kind not in "iu" or flat.size != expected * row_length:
            raise DataError(
                f"holds {flat.size} values of type {flat.dtype}; expected {expected} rows of {row_length} token ids",
                file.name,
                row_group=row_group,
            )
        tokens: _Stored = flat.reshape(expected, row_length)
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

    def _parquet(self, file: DataFile) -> pq.ParquetFile:
        opened = self._open.get(file.name)
        if opened is not None:
            self._open.move_to_end(file.name)
            return opened
        source = pa.PythonFile(_RangedFile(self._store, file, self._config.deadline_s), mode="r")
        opened = pq.ParquetFile(source, page_checksum_verification=True)
        found = (opened.metadata.num_rows, opened.metadata.num_row_groups)
        if found != (file.rows, file.row_groups):
            raise DataError(
                f"holds {found[0]} rows in {found[1]} row groups; the card says {file.rows} in {file.row_groups}",
                file.name,
            )
        self._open[file.name] = opened
        if len(self._open) > OPEN_FILES:
            self._open.popitem(last=False)
        return opened


class _RangedFile(io.RawIOBase):
    """An object of known size as a file that fetches exactly what is read."""

    def __init__(self, store: ObjectStore, file: DataFile, deadline_s: float) -> None:
        self._store, self._key, self._size, self._deadline_s = store, file.name, file.size, deadline_s
        self._offset = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._size}[whence]
        self._offset = base + offset
        return self._offset

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._offset)
        length = left if size is None or size < 0 else min(size, left)
        if not length:
            return b""
        data = self._store.get_range(self._key, self._offset, length, deadline_s=self._deadline_s)
        self._offset += len(data)
        return data
