"""Opens one file of a dataset and reads its row groups by range, each found whole or refused.

A Parquet row group is a row group; an Arrow IPC one is a record batch. Parquet's pages have checksums; Arrow has none,
so each batch carries a digest of its tokens, its number and its type. What the tokens mean is `dataset`'s business.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import xxhash

from storage.errors import ObjectMissing
from storage.object_store import ObjectStore
from workers.data_errors import DataError
from workers.dataset_card import DataFile

__all__ = ["BATCH_DIGEST", "NUM_ROWS", "RowGroupFile", "batch_digest", "open_row_groups"]

Stored = npt.NDArray[np.integer]

BATCH_DIGEST: Final = b"raysume.xxh3_128"
NUM_ROWS: Final = b"raysume.rows"

_NOTHING: Final[Mapping[tuple[int, int], bytes]] = MappingProxyType({})


class RowGroupFile(Protocol):
    """One open file; several threads may read it at a time."""

    def read(self, row_group: int) -> Stored:
        """All tokens of one row group, flat, in an array of its own. Raises DataError when they are not readable."""
        ...


def open_row_groups(store: ObjectStore, file: DataFile, *, deadline_s: float) -> RowGroupFile:
    """The file that the card describes. Raises DataError when it is missing, damaged or of other rows."""
    kind = _ArrowFile if file.name.endswith(".arrow") else _ParquetFile
    try:
        opened: _ArrowFile | _ParquetFile = kind(store, file, deadline_s)
        found = opened.shape
    except ObjectMissing as error:
        raise _missing(file) from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"not readable: {error}", file.name) from error
    if found != (file.rows, file.row_groups):
        raise DataError(
            f"holds {found[0]} rows in {found[1]} row groups; the card says {file.rows} in {file.row_groups}",
            file.name,
        )
    return opened


def batch_digest(number: int, tokens: Stored) -> str:
    """Digest of one record batch: its place in the file and the type and bytes of its tokens, little-endian."""
    little = np.ascontiguousarray(tokens.reshape(-1), dtype=tokens.dtype.newbyteorder("<"))
    digest = xxhash.xxh3_128(f"batch {number} {tokens.dtype.name} ".encode())
    digest.update(little.tobytes())
    return digest.hexdigest()


class _ParquetFile:
    """Keeps the parsed footer alone; each read has a file object of its own, which no other thread moves about in."""

    def __init__(self, store: ObjectStore, file: DataFile, deadline_s: float) -> None:
        self._file, self._source = file, partial(_RangedFile, store, file, deadline_s)
        self._metadata = pq.ParquetFile(pa.PythonFile(self._source(), mode="r")).metadata

    @property
    def shape(self) -> tuple[int, int]:
        return self._metadata.num_rows, self._metadata.num_row_groups

    def read(self, row_group: int) -> Stored:
        try:
            source = pa.PythonFile(self._source(), mode="r")
            opened = pq.ParquetFile(source, metadata=self._metadata, page_checksum_verification=True)
            column = opened.read_row_group(row_group, columns=["tokens"]).column("tokens")
            tokens = _values(column.combine_chunks().flatten())
        except ObjectMissing as error:
            raise _missing(self._file) from error
        except (pa.ArrowException, OSError, KeyError) as error:
            raise DataError(f"not readable: {error}", self._file.name, row_group=row_group) from error
        return tokens


class _ArrowFile:
    """Keeps the bytes of the footer; each read opens the file anew from them, for a reader is one thread's."""

    def __init__(self, store: ObjectStore, file: DataFile, deadline_s: float) -> None:
        self._file, self._source = file, partial(_RangedFile, store, file, deadline_s)
        first = self._source()
        opened = pyarrow.ipc.open_file(pa.PythonFile(first, mode="r"))
        self._footer = first.fetched
        metadata = opened.schema.metadata or {}
        self.shape = int(metadata.get(NUM_ROWS, b"-1")), opened.num_record_batches

    def read(self, row_group: int) -> Stored:
        try:
            opened = pyarrow.ipc.open_file(pa.PythonFile(self._source(self._footer), mode="r"))
            found = opened.get_batch_with_custom_metadata(row_group)
            found.batch.validate(full=True)
            # A copy: the batch is a window into all the bytes that were read for it.
            tokens = _values(found.batch.column("tokens").flatten()).copy()
            saved = (found.custom_metadata or {}).get(BATCH_DIGEST, b"").decode("ascii", "replace")
        except ObjectMissing as error:
            raise _missing(self._file) from error
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            raise DataError(f"not readable: {error}", self._file.name, row_group=row_group) from error
        found_digest = batch_digest(row_group, tokens)
        if found_digest != saved:
            raise DataError(
                f"not readable: record batch {row_group} has digest {found_digest}, "
                f"expected {saved or 'one beside it, found none'}",
                self._file.name,
                row_group=row_group,
            )
        return tokens


def _values(array: pa.Array) -> Stored:
    """As numpy, from the buffer itself: pyarrow's conversion imports pandas where that is installed, which holds the
    first step up by half a second and leaves thousands of objects for every collection of garbage to look at."""
    if array.null_count or not len(array) or not pa.types.is_integer(array.type):
        converted: Stored = array.to_numpy(zero_copy_only=False)
        return converted
    dtype = np.dtype(array.type.to_pandas_dtype())
    return np.frombuffer(array.buffers()[1], dtype, count=len(array), offset=array.offset * dtype.itemsize)


def _missing(file: DataFile) -> DataError:
    return DataError("the file is missing although the card names it", file.name)


class _RangedFile(io.RawIOBase):
    """An object of known size as a file that fetches exactly what is read, and nothing that was ``known`` before.

    ``fetched``: what was, by offset and length.
    """

    def __init__(
        self, store: ObjectStore, file: DataFile, deadline_s: float, known: Mapping[tuple[int, int], bytes] = _NOTHING
    ) -> None:
        self._store, self._key, self._size, self._deadline_s = store, file.name, file.size, deadline_s
        self._known, self.fetched = known, dict[tuple[int, int], bytes]()
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
        data = self._known.get((self._offset, length))
        if data is None:
            data = self._store.get_range(self._key, self._offset, length, deadline_s=self._deadline_s)
            self.fetched[self._offset, length] = data
        self._offset += len(data)
        return data
