"""Tiny datasets for tests: row ``i`` holds the token ``i`` throughout, so what is read names its row."""

from __future__ import annotations

import numpy as np

from storage.open_store import open_store
from workers.dataset_card import DataFormat, DatasetCard, SourceSummary
from workers.dataset_writer import DatasetWriter

__all__ = ["write_numbered_rows"]


def write_numbered_rows(
    url: str,
    num_rows: int,
    *,
    sequence_length: int = 4,
    validation_rows: int = 0,
    row_group_rows: int = 4,
    data_format: DataFormat = "parquet",
    first_token: int = 0,
    vocab_size: int | None = None,
    tokenizer: bytes = b"{}",
) -> DatasetCard:
    """``num_rows`` training rows in files of two row groups; validation rows hold ``num_rows`` and onward.

    ``first_token``: the token of row 0, for sources of a mix, which have to have one vocabulary.
    """
    total = num_rows + validation_rows
    writer = DatasetWriter(
        open_store(url),
        sequence_length=sequence_length,
        vocab_size=vocab_size or max(first_token + total, 2),
        row_group_rows=row_group_rows,
        file_rows=2 * row_group_rows,
        data_format=data_format,
    )
    rows = np.repeat(np.arange(first_token, first_token + total)[:, None], sequence_length + 1, axis=1)
    writer.append_rows(rows[:num_rows])
    writer.append_validation_rows(rows[num_rows:])
    return writer.finish(
        tokenizer=tokenizer, source=SourceSummary(description="numbered", num_documents=0, num_bytes=0)
    )
