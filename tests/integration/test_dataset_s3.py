"""Datasets of both formats on object storage, read by range. Real: OpenStack Swift over HTTP."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.config import StoreConfig
from storage.open_store import open_store
from tests.fakes.token_datasets import write_numbered_rows
from workers.config import DataConfig, SourceConfig
from workers.data_errors import DataError
from workers.dataset import TokenDataset
from workers.dataset_card import DataFormat
from workers.dataset_mix import open_rows
from workers.stream import LeafStream

VOCABULARY = 500


def mix_at(root: str, **changes: Any) -> DataConfig:
    """Source a, of Parquet, holds the tokens 0 to 15; source b, of Arrow, 100 to 107."""
    write_numbered_rows(f"{root}/a", 16, vocab_size=VOCABULARY)
    write_numbered_rows(f"{root}/b", 8, vocab_size=VOCABULARY, first_token=100, data_format="arrow")
    sources = (SourceConfig(url=f"{root}/a", weight=2), SourceConfig(url=f"{root}/b", weight=1))
    return DataConfig(**({"sources": sources, "sequence_length": 4, "global_batch": 6, "micro_batch": 2} | changes))


def tokens_of(data: DataConfig, world_size: int, steps: range) -> list[int]:
    rows = open_rows(data, "train", StoreConfig(deadline_s=20.0, retries=1))
    found: dict[tuple[int, int], list[int]] = {}
    for rank in range(world_size):
        with LeafStream(rows, data, 0, rank, world_size) as stream:
            stream.seek(steps.start)
            for step in steps:
                for leaf in stream.leaves(step):
                    if not leaf.is_surplus:
                        found[step, leaf.index] = leaf.input_ids[:, 0].tolist()
    return [token for place in sorted(found) for token in found[place]]


@pytest.mark.parametrize("shuffle", ["rows", "blocks"])
def test_a_mix_on_object_storage_is_the_same_stream_as_in_memory_at_any_world_size(bucket: str, shuffle: str) -> None:
    there = mix_at(f"s3://{bucket}/mix", shuffle=shuffle, shuffle_window_groups=2)
    here = mix_at(f"memory://{bucket}-{shuffle}", shuffle=shuffle, shuffle_window_groups=2)
    expected = tokens_of(here, 1, range(1, 5))
    assert sorted(expected) == [*range(16), *range(100, 108)]
    assert tokens_of(there, 2, range(1, 3)) + tokens_of(there, 3, range(3, 5)) == expected


def place_in_the_last_row_group(file: bytes, data_format: DataFormat) -> int:
    """Somewhere in its tokens: right before the footer lies what was written last."""
    if data_format == "arrow":
        return file.rindex(bytes([63, 0]) * 256) + 100
    last = pq.read_metadata(pa.BufferReader(file)).row_group(1).column(0)
    return int(last.data_page_offset + last.total_compressed_size) - 8


@pytest.mark.parametrize("data_format", ["parquet", "arrow"])
def test_a_bit_that_flipped_on_object_storage_is_named(bucket: str, data_format: DataFormat) -> None:
    url = f"s3://{bucket}/{data_format}"
    write_numbered_rows(url, 64, sequence_length=255, row_group_rows=32, data_format=data_format)
    store = open_store(url)
    name = f"train-00000.{data_format}"
    damaged = bytearray(store.get(name))
    damaged[place_in_the_last_row_group(bytes(damaged), data_format)] ^= 8
    store.put(name, bytes(damaged))
    dataset = TokenDataset.open(url, "train")
    assert dataset.rows([31])[0, 0] == 31
    with pytest.raises(DataError) as caught:
        dataset.rows([32])
    assert (caught.value.file, caught.value.row_group) == (name, 1)


def test_memory_holds_a_few_row_groups_of_a_dataset_on_object_storage(bucket: str) -> None:
    url = f"s3://{bucket}/rows"
    card = write_numbered_rows(url, 48, data_format="arrow")
    dataset = TokenDataset(url, card, "train", StoreConfig(), cached_row_groups=3)
    assert dataset.rows(range(47, -1, -1))[:, 0].tolist() == list(range(47, -1, -1))
    assert dataset.cached_bytes == 3 * 4 * 5 * 2
