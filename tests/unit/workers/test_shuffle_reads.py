"""What each shuffle costs in reads of the store, counted; datasets in memory."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from storage.config import StoreConfig
from storage.memory_store import MemoryStore
from storage.open_store import open_store
from workers.config import DataConfig
from workers.dataset import TokenDataset
from workers.dataset_card import DataFile, DataFormat, DatasetCard, SourceSummary
from workers.dataset_mix import open_rows
from workers.dataset_writer import DatasetWriter
from workers.row_group_files import RowGroupFile
from workers.stream import LeafStream

ROW_GROUPS, GROUP_ROWS, SEQUENCE_LENGTH = 120, 8, 1023
NUM_ROWS = ROW_GROUPS * GROUP_ROWS - 5  # the last row group is short


def write_random_rows(url: str, data_format: DataFormat) -> DatasetCard:
    """Rows that do not shrink when they are compressed, in three files."""
    writer = DatasetWriter(
        open_store(url),
        sequence_length=SEQUENCE_LENGTH,
        vocab_size=1 << 16,
        row_group_rows=GROUP_ROWS,
        file_rows=ROW_GROUPS // 3 * GROUP_ROWS,
        data_format=data_format,
    )
    writer.append_rows(np.random.default_rng(0).integers(0, 1 << 16, (NUM_ROWS, SEQUENCE_LENGTH + 1)))
    return writer.finish(tokenizer=b"{}", source=SourceSummary(description="", num_documents=0, num_bytes=0))


class Reads:
    """Counts what is asked of the store, and the most that a dataset kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes, self.most_kept = 0, 0
        self.groups: Counter[tuple[str, int]] = Counter()
        get_range, read = MemoryStore.get_range, TokenDataset._read

        def counted(store: MemoryStore, key: str, offset: int, length: int, *, deadline_s: float = 60.0) -> bytes:
            self.num_bytes += length
            return get_range(store, key, offset, length, deadline_s=deadline_s)

        def seen(dataset: TokenDataset, opened: RowGroupFile, file: DataFile, row_group: int) -> object:
            self.groups[file.name, row_group] += 1
            self.most_kept = max(self.most_kept, dataset.cached_bytes)
            return read(dataset, opened, file, row_group)

        monkeypatch.setattr(MemoryStore, "get_range", counted)
        monkeypatch.setattr(TokenDataset, "_read", seen)


@pytest.fixture
def epoch_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Reads, float]]:
    """What rank 1 of 2 reads in its first epoch, and over the size of the data."""

    def run(data_format: DataFormat, **shuffle: object) -> tuple[Reads, float]:
        url = f"memory://{uuid.uuid4()}"
        card = write_random_rows(url, data_format)
        settings = {"url": url, "sequence_length": SEQUENCE_LENGTH, "global_batch": 4, "micro_batch": 2}
        data = DataConfig.model_validate(settings | shuffle)
        reads = Reads(monkeypatch)
        rows = open_rows(data, "train", StoreConfig())
        with LeafStream(rows, data, 0, 1, 2) as stream:
            stream.seek(1)
            for step in range(1, NUM_ROWS // 4 + 1):
                list(stream.leaves(step))
        return reads, reads.num_bytes / sum(file.size for file in card.files)

    return run


@pytest.mark.parametrize("data_format", ["parquet", "arrow"])
def test_shuffled_by_blocks_each_row_group_is_read_once_and_a_window_is_kept(
    epoch_of_one_rank: Callable[..., tuple[Reads, float]], data_format: DataFormat
) -> None:
    reads, share = epoch_of_one_rank(data_format, shuffle="blocks", shuffle_window_groups=4, prefetch=0)
    assert len(reads.groups) == ROW_GROUPS
    assert set(reads.groups.values()) == {1}
    assert 0.99 < share < 1.1  # the data once, and three footers
    assert reads.most_kept <= 2 * 4 * GROUP_ROWS * (SEQUENCE_LENGTH + 1) * 2


def test_shuffled_by_rows_almost_every_row_is_a_read(
    epoch_of_one_rank: Callable[..., tuple[Reads, float]],
) -> None:
    reads, share = epoch_of_one_rank("parquet", shuffle="rows", prefetch=0)
    rows_of_this_rank = NUM_ROWS / 2
    assert 0.6 * rows_of_this_rank < reads.groups.total() <= rows_of_this_rank
    assert share > 2.0
    assert reads.most_kept <= 32 * GROUP_ROWS * (SEQUENCE_LENGTH + 1) * 2
