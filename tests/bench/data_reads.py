"""What a shuffle costs in reads: bytes read in an epoch over bytes stored. Counted, not timed.

`python -m tests.bench.data_reads` prints one line for each format and shuffle.
"""

from __future__ import annotations

import argparse
import uuid

import numpy as np

from storage.config import StoreConfig
from storage.memory_store import MemoryStore
from storage.open_store import open_store
from workers.config import DataConfig
from workers.dataset_card import DataFormat, SourceSummary
from workers.dataset_mix import open_rows
from workers.dataset_writer import DatasetWriter
from workers.stream import LeafStream

FORMATS: tuple[DataFormat, ...] = ("parquet", "arrow")


def main() -> None:
    """Write random rows in each format and read one epoch of them with each shuffle, as rank 1 of two."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rows", type=int, default=955)
    parser.add_argument("--row-group-rows", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=1023)
    parser.add_argument("--window-groups", type=int, default=4)
    options = parser.parse_args()
    for data_format in FORMATS:
        url = f"memory://{uuid.uuid4()}"
        writer = DatasetWriter(
            open_store(url),
            sequence_length=options.sequence_length,
            vocab_size=1 << 16,
            row_group_rows=options.row_group_rows,
            data_format=data_format,
        )
        shape = (options.rows, options.sequence_length + 1)
        writer.append_rows(np.random.default_rng(0).integers(0, 1 << 16, shape))
        card = writer.finish(tokenizer=b"{}", source=SourceSummary(description="", num_documents=0, num_bytes=0))
        stored = sum(file.size for file in card.files)
        for shuffle in ("rows", "blocks"):
            data = DataConfig.model_validate(
                {
                    "url": url,
                    "sequence_length": options.sequence_length,
                    "global_batch": 4,
                    "micro_batch": 2,
                    "prefetch": 0,
                    "shuffle": shuffle,
                    "shuffle_window_groups": options.window_groups,
                }
            )
            read = _bytes_of_an_epoch(data, options.rows // 4)
            print(f"{data_format:<8} {shuffle:<7} {read / stored:.2f}  ({read} of {stored} bytes)")


def _bytes_of_an_epoch(data: DataConfig, steps: int) -> int:
    read = 0
    get_range = MemoryStore.get_range

    def counted(store: MemoryStore, key: str, offset: int, length: int, *, deadline_s: float = 60.0) -> bytes:
        nonlocal read
        read += length
        return get_range(store, key, offset, length, deadline_s=deadline_s)

    MemoryStore.get_range = counted  # type: ignore[method-assign,assignment]
    try:
        with LeafStream(open_rows(data, "train", StoreConfig()), data, 0, 1, 2) as stream:
            stream.seek(1)
            for step in range(1, steps + 1):
                list(stream.leaves(step))
    finally:
        MemoryStore.get_range = get_range  # type: ignore[method-assign]
    return read


if __name__ == "__main__":
    main()
