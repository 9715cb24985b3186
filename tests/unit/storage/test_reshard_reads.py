"""Saving at one world size and loading at another, planned as DCP plans it, in one process: equal bits, few bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from storage import RaysumeReader, RaysumeWriter
from storage.config import CheckpointConfig
from tests.fakes.virtual_ranks import load_as, save_as

Tensors = dict[str, torch.Tensor]


def odd_state() -> Tensors:
    generator = torch.Generator().manual_seed(5)
    return {
        "uneven": torch.randn(13, 3, generator=generator),
        "one_row": torch.randn(1, 5, generator=generator),
        "one": torch.randn(1, generator=generator),
        "number": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
        "cube": torch.randn(33, 2, 7, generator=generator).to(torch.bfloat16),
        "flags": torch.rand(50, generator=generator) > 0.5,
    }


def save(url: Path, world_size: int, tensors: Tensors, **options: str) -> None:
    config = CheckpointConfig(**options)  # type: ignore[arg-type]
    save_as([RaysumeWriter(url, step=1, config=config) for _ in range(world_size)], tensors)


def load(url: Path, world_size: int, like: Tensors) -> tuple[Tensors, list[RaysumeReader]]:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    readers = [RaysumeReader(url) for _ in range(world_size)]
    load_as(readers, tensors)
    return tensors, readers


@pytest.mark.parametrize(
    ("saving", "loading"), [(4, 3), (3, 5), (4, 5), (8, 32), (32, 8), (1, 7), (7, 1), (2, 64), (5, 5)]
)
def test_every_bit_is_there_at_another_size(tmp_path: Path, saving: int, loading: int) -> None:
    tensors = odd_state()
    save(tmp_path, saving, tensors)
    loaded, _ = load(tmp_path, loading, tensors)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("loading", [3, 5])
def test_a_reshard_reads_little_more_than_the_checkpoint(tmp_path: Path, loading: int) -> None:
    """Shards of 4 MiB. Encoded raw, so that it says the same of any content."""
    tensors = {f"layer.{number}": torch.full((4096, 1024), float(number)) for number in range(4)}
    save(tmp_path, 4, tensors, encoding="raw")
    loaded, readers = load(tmp_path, loading, tensors)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    stored = readers[0].manifest.stored_bytes
    assert stored <= sum(reader.bytes_read for reader in readers) <= 1.10 * stored


def test_a_rank_reads_nothing_of_shards_it_does_not_need(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(64, 1024)}
    save(tmp_path, 4, tensors)
    _, readers = load(tmp_path, 4, tensors)
    manifest = readers[0].manifest
    assert [reader.bytes_read for reader in readers] == [shard.size for shard in manifest.shards]
