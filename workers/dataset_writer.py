"""Writes packed token rows as a dataset: Parquet or Arrow IPC files, the tokenizer, and last of all the card.

Packing: the token stream of all documents, each followed by the end-of-text id, is cut into rows of
``sequence_length + 1`` tokens with stride ``sequence_length``. A row's last token is the next row's first, so inputs
are ``row[:-1]``, labels ``row[1:]``, and every token of the stream but the first is predicted once. A tail that fills
no row is dropped. Nothing here reads text.
"""

from __future__ import annotations

import io
import logging
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import xxhash

from storage.errors import ObjectMissing
from storage.object_store import ObjectStore
from workers.data_errors import DataError
from workers.dataset_card import (
    CARD_KEY,
    TOKENIZER_KEY,
    DataFile,
    DataFormat,
    DatasetCard,
    SourceSummary,
    Split,
    TokenType,
    make_fingerprint,
)
from workers.row_group_files import BATCH_DIGEST, NUM_ROWS, batch_digest

__all__ = ["DatasetWriter", "default_row_group_rows", "refuse_existing", "token_type"]

logger = logging.getLogger(__name__)

Ids = npt.NDArray[np.integer]

FILE_TOKENS: Final = 16 << 20
# A shuffled read fetches one row group for each row: keep it near 32 Ki tokens, enough to compress, cheap to fetch.
ROW_GROUP_TOKENS: Final = 32 << 10
MAX_ROW_GROUP_ROWS: Final = 256


def token_type(vocab_size: int) -> TokenType:
    """The narrowest stored type that holds every id of the vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def default_row_group_rows(sequence_length: int) -> int:
    """A power of two of rows, at most 256, near ``ROW_GROUP_TOKENS`` tokens."""
    fitting = max(1, ROW_GROUP_TOKENS // (sequence_length + 1))
    return min(MAX_ROW_GROUP_ROWS, 1 << (fitting.bit_length() - 1))


def refuse_existing(store: ObjectStore, deadline_s: float) -> None:
    """Raise DataError when ``store`` holds a dataset."""
    try:
        store.get(CARD_KEY, deadline_s=deadline_s)
    except ObjectMissing:
        return
    raise DataError(f"{store.url} holds a dataset already; choose another place or delete it first")


class DatasetWriter:
    """Takes token ids or whole rows, holds out validation rows, writes files as they fill, and the card in `finish`.

    Row ``i`` of the stream is held out where ``floor((i + 1) * fraction + phase)`` exceeds ``floor(i * fraction +
    phase)``: evenly spread, fixed by seed and row number alone. At least one row is held out when the fraction is not
    zero and more than one row exists.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        sequence_length: int,
        vocab_size: int,
        end_of_text_id: int = 0,
        validation_fraction: float = 0.0,
        seed: int = 0,
        dtype: TokenType | None = None,
        row_group_rows: int | None = None,
        file_rows: int | None = None,
        data_format: DataFormat = "parquet",
        deadline_s: float = 120.0,
    ) -> None:
        self._store, self._deadline_s, self._format = store, deadline_s, data_format
        self._sequence_length, self._vocab_size = sequence_length, vocab_size
        self._end_of_text_id = end_of_text_id
        self._dtype: TokenType = dtype or token_type(vocab_size)
        self._row_group_rows = row_group_rows or default_row_group_rows(sequence_length)
        wanted = file_rows or max(1, FILE_TOKENS // (sequence_length + 1))
        self._file_rows = max(1, wanted // self._row_group_rows) * self._row_group_rows
        self._fraction = validation_fraction
        self._phase = (xxhash.xxh3_64_intdigest(f"validation:{seed}".encode()) >> 11) / float(1 << 53)
        self._rest = np.empty(0, dtype=self._dtype)
        self._rows_seen = 0
        self._num_rows: dict[Split, int] = {"train": 0, "validation": 0}
        self._pending: dict[Split, list[npt.NDArray[np.unsignedinteger]]] = {"train": [], "validation": []}
        self._files: list[DataFile] = []
        refuse_existing(store, deadline_s)

    def append(self, ids: Ids) -> None:
        """Add the next tokens of the stream. Raises DataError for an id that is out of range or does not fit."""
        stream = np.concatenate([self._rest, self._checked(np.asarray(ids))])
        stride = self._sequence_length
        count = (len(stream) - 1) // stride if len(stream) else 0
        if count > 0:
            windows = np.lib.stride_tricks.sliding_window_view(stream, stride + 1)[::stride]
            self._add_rows(windows[:count].copy())
        self._rest = stream[count * stride :]

    def append_rows(self, rows: Ids) -> None:
        """Add ready rows, shape [n, sequence_length + 1], from data packed elsewhere."""
        self._add_rows(self._checked_rows(rows))

    def append_validation_rows(self, rows: Ids) -> None:
        """Add ready rows to the validation split, whatever the fraction."""
        self._add_to("validation", self._checked_rows(rows))

    def finish(self, *, tokenizer: bytes, source: SourceSummary) -> DatasetCard:
        """Write what is pending, the tokenizer, then the card. Raises DataError when no row came together."""
        self._hold_out_at_least_one()
        for split in ("train", "validation"):
            self._write_files(split, everything=True)
        if not self._num_rows["train"]:
            raise DataError(
                f"the source gives no training row of {self._sequence_length + 1} tokens; "
                "use more text or a smaller sequence length"
            )
        files = tuple(sorted(self._files, key=lambda file: file.name))
        digest = xxhash.xxh3_128_hexdigest(tokenizer)
        card = DatasetCard(
            fingerprint=make_fingerprint(
                files,
                tokenizer_digest=digest,
                sequence_length=self._sequence_length,
                vocab_size=self._vocab_size,
                row_group_rows=self._row_group_rows,
            ),
            sequence_length=self._sequence_length,
            vocab_size=self._vocab_size,
            dtype=self._dtype,
            end_of_text_id=self._end_of_text_id,
            row_group_rows=self._row_group_rows,
            num_train_rows=self._num_rows["train"],
            num_validation_rows=self._num_rows["validation"],
            tokenizer_digest=digest,
            source=source,
            files=files,
        )
        self._store.put(TOKENIZER_KEY, tokenizer, deadline_s=self._deadline_s)
        self._store.put(CARD_KEY, card.model_dump_json(indent=1).encode(), deadline_s=self._deadline_s)
        logger.info(
            "dataset %s written to %s: %d training rows", card.fingerprint, self._store.url, card.num_train_rows
        )
        return card

    def _checked(self, ids: Ids) -> npt.NDArray[np.unsignedinteger]:
        """The ids in the stored type, or a refusal: a cast that wraps would train on other tokens in silence."""
        limit = min(self._vocab_size, int(np.iinfo(self._dtype).max) + 1)
        if ids.size and (int(ids.max()) >= limit or int(ids.min()) < 0):
            bad = int(ids[(ids < 0) | (ids >= limit)].flat[0])
            raise DataError(
                f"token id {bad} is outside 0..{limit - 1} (vocabulary {self._vocab_size}, stored as {self._dtype})"
            )
        return ids.astype(self._dtype)

    def _checked_rows(self, rows: Ids) -> npt.NDArray[np.unsignedinteger]:
        array = np.asarray(rows)
        if array.ndim != 2 or array.shape[1] != self._sequence_length + 1:
            raise DataError(f"rows have shape {array.shape}; expected [n, {self._sequence_length + 1}]")
        return self._checked(array)

    def _add_rows(self, rows: npt.NDArray[np.unsignedinteger]) -> None:
        numbers = np.arange(self._rows_seen, self._rows_seen + len(rows), dtype=np.float64)
        held_out = np.floor((numbers + 1) * self._fraction + self._phase) > np.floor(
            numbers * self._fraction + self._phase
        )
        self._rows_seen += len(rows)
        self._add_to("train", rows[~held_out])
        self._add_to("validation", rows[held_out])

    def _add_to(self, split: Split, rows: npt.NDArray[np.unsignedinteger]) -> None:
        if len(rows):
            self._num_rows[split] += len(rows)
            self._pending[split].append(rows)
            self._write_files(split, everything=False)

    def _hold_out_at_least_one(self) -> None:
        if self._fraction > 0 and not self._num_rows["validation"] and self._num_rows["train"] > 1:
            last = self._pending["train"][-1]
            self._pending["train"][-1] = last[:-1]
            self._pending["validation"].append(last[-1:])
            self._num_rows["train"] -= 1
            self._num_rows["validation"] += 1

    def _write_files(self, split: Split, *, everything: bool) -> None:
        """Write whole files; the newest rows always stay pending until ``everything`` is asked for."""
        waiting = sum(map(len, self._pending[split]))
        if not waiting or (waiting <= self._file_rows and not everything):
            return
        rows = np.concatenate(self._pending[split])
        start = 0
        while len(rows) - start > self._file_rows or (everything and start < len(rows)):
            self._write_file(split, rows[start : start + self._file_rows])
            start += self._file_rows
        self._pending[split] = [rows[start:].copy()] if start < len(rows) else []

    def _write_file(self, split: Split, rows: npt.NDArray[np.unsignedinteger]) -> None:
        number = sum(file.split == split for file in self._files)
        name = f"{split}-{number:05d}.{self._format}"
        write = _parquet_bytes if self._format == "parquet" else _arrow_bytes
        data = write(rows, self._row_group_rows)
        self._store.put(name, data, deadline_s=self._deadline_s)
        self._files.append(
            DataFile(
                name=name,
                split=split,
                rows=len(rows),
                row_groups=-(-len(rows) // self._row_group_rows),
                size=len(data),
                digest=xxhash.xxh3_128_hexdigest(data),
            )
        )


def _tokens(rows: npt.NDArray[np.unsignedinteger]) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])


def _parquet_bytes(rows: npt.NDArray[np.unsignedinteger], row_group_rows: int) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(
        pa.table({"tokens": _tokens(rows)}),
        buffer,
        row_group_size=row_group_rows,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    )
    return buffer.getvalue()


def _arrow_bytes(rows: npt.NDArray[np.unsignedinteger], row_group_rows: int) -> bytes:
    """Not compressed: a batch is read with nothing to undo. Its digest travels with it, for Arrow has no checksums."""
    buffer = io.BytesIO()
    schema = pa.schema([("tokens", _tokens(rows[:1]).type)], metadata={NUM_ROWS: str(len(rows)).encode()})
    with pyarrow.ipc.new_file(buffer, schema) as writer:
        for number, first in enumerate(range(0, len(rows), row_group_rows)):
            part = rows[first : first + row_group_rows]
            batch = pa.record_batch([_tokens(part)], schema=schema)
            writer.write_batch(batch, custom_metadata={BATCH_DIGEST: batch_digest(number, part).encode()})
    return buffer.getvalue()
