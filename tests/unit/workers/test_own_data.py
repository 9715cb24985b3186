"""A dataset of the loop's own through the real stream: index, order and reading are real."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from storage.config import StoreConfig
from workers.config import DataConfig
from workers.data_errors import DataError
from workers.dataset_mix import open_rows
from workers.own_data import INDEX_SEQUENCE_LENGTH, OwnSamples, write_index
from workers.stream import Leaf, LeafStream

NUM_SAMPLES = 24


class Pair(NamedTuple):
    number: Any
    name: Any


class Squares:
    """A sample that names its number."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int, /) -> dict[str, Any]:
        return {"x": torch.tensor([number, number * number]), "pair": Pair(number, f"sample {number}")}


def leaves(folder: Path, rank: int, world_size: int, steps: range, position: int = 0) -> list[Leaf]:
    config = DataConfig(url=str(folder / "index"), sequence_length=INDEX_SEQUENCE_LENGTH, global_batch=8, micro_batch=2)
    with LeafStream(open_rows(config, "train", StoreConfig()), config, 5, rank, world_size) as stream:
        stream.seek(steps.start, position)
        return [leaf for step in steps for leaf in stream.leaves(step) if not leaf.is_surplus]


def test_every_sample_comes_once_an_epoch_though_the_world_changes(tmp_path: Path) -> None:
    card = write_index(str(tmp_path / "index"), NUM_SAMPLES, version="squares 1")
    assert card.num_train_rows == NUM_SAMPLES
    samples = OwnSamples(Squares())
    taken = leaves(tmp_path, 0, 1, range(1, 2))
    taken += [leaf for rank in range(3) for leaf in leaves(tmp_path, rank, 3, range(2, 4), position=8)]
    numbers = [int(x) for leaf in taken for x in samples.batch(leaf)["x"][:, 0]]
    assert sorted(numbers) == list(range(NUM_SAMPLES))
    assert numbers != sorted(numbers), "not shuffled"


@pytest.mark.parametrize("num_threads", [0, 3])
def test_a_batch_is_what_collate_makes_of_the_samples_that_the_leaf_names(tmp_path: Path, num_threads: int) -> None:
    write_index(str(tmp_path / "index"), NUM_SAMPLES, version="squares 1")
    leaf, *_ = leaves(tmp_path, 0, 1, range(1, 2))
    batch = OwnSamples(Squares(), num_threads=num_threads).batch(leaf)
    first, second = leaf.sample_ids.tolist()
    assert batch["x"].tolist() == [[first, first * first], [second, second * second]]
    assert batch["pair"].number.tolist() == [first, second]
    assert list(batch["pair"].name) == [f"sample {first}", f"sample {second}"]
    assert OwnSamples(Squares(), len).batch(leaf) == 2


def test_an_index_of_a_larger_dataset_is_refused_by_number(tmp_path: Path) -> None:
    write_index(str(tmp_path / "index"), 1000, version="squares 1")
    leaf = max(leaves(tmp_path, 0, 1, range(1, 2)), key=lambda leaf: int(leaf.sample_ids.max()))
    with pytest.raises(DataError, match=r"names sample \d+, the dataset has 24"):
        OwnSamples(Squares()).batch(leaf)


def test_the_fingerprint_tells_datasets_of_one_size_apart(tmp_path: Path) -> None:
    cards = [write_index(str(tmp_path / version), NUM_SAMPLES, version=version) for version in ("one", "two")]
    again = write_index(str(tmp_path / "again"), NUM_SAMPLES, version="one")
    assert cards[0].fingerprint == again.fingerprint != cards[1].fingerprint


def test_an_index_takes_next_to_no_space(tmp_path: Path) -> None:
    write_index(str(tmp_path / "index"), 200_000, version="many")
    stored = sum(file.stat().st_size for file in (tmp_path / "index").iterdir())
    assert stored < 40_000, f"{stored} bytes"
    ids = np.concatenate([leaf.sample_ids for leaf in leaves(tmp_path, 0, 1, range(1, 20))])
    assert len(set(ids.tolist())) == len(ids)
