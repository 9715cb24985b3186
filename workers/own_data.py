"""Samples of a dataset of the loop's own, in the order that the Session keeps: which sample comes when stays Raysume's.

The dataset is any that gives a sample by its number. An index of as many rows stands in its place in the configuration
(`write_index`); a leaf of it names numbers, and `OwnSamples` makes the batch of them. Order, exactly-once, refusal of
other data and `raysume data audit` are those of every Run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate

from storage.config import StoreConfig
from storage.open_store import open_store
from workers.data_errors import DataError
from workers.dataset_card import DatasetCard, SourceSummary
from workers.dataset_writer import DatasetWriter
from workers.stream import Leaf
from workers.train_step import TrainStep

__all__ = ["INDEX_SEQUENCE_LENGTH", "OwnSamples", "Samples", "write_index"]

INDEX_SEQUENCE_LENGTH: Final = 2
"""``data.sequence_length`` of an index: the least there is."""
_GROUP_ROWS: Final = 1 << 16  # they are all alike, so a group takes next to nothing, and most indexes are few groups


class Samples(Protocol):
    """A map-style dataset, as torch.utils.data.Dataset and Hugging Face's are."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


def write_index(url: str, num_samples: int, *, version: str, store: StoreConfig | None = None) -> DatasetCard:
    """Write what ``data.url`` names for a dataset of ``num_samples`` samples. Raises DataError where one lies already.

    ``version`` says which dataset it is, in words of one's own: a Run refuses to go on with an index of another.
    """
    if num_samples < 1:
        raise ValueError(f"an index of {num_samples} samples: expected 1 or more")
    writer = DatasetWriter(
        open_store(url, store or StoreConfig()),
        sequence_length=INDEX_SEQUENCE_LENGTH,
        vocab_size=2,
        row_group_rows=_GROUP_ROWS,
    )
    for first in range(0, num_samples, _GROUP_ROWS):
        rows = min(_GROUP_ROWS, num_samples - first)
        writer.append_rows(np.zeros((rows, INDEX_SEQUENCE_LENGTH + 1), dtype=np.int64))
    return writer.finish(
        tokenizer=json.dumps({"index_of": version}).encode(),
        source=SourceSummary(description=f"index of {version}", num_documents=num_samples, num_bytes=0),
    )


class OwnSamples:
    """``collate``: a list of samples to a batch. ``num_threads``: that read the samples of a leaf side by side; with 0
    the loop's own thread does, and what the dataset draws at random is then fixed by the leaf in a reproducible Run."""

    def __init__(
        self, dataset: Samples, collate: Callable[[list[Any]], Any] = default_collate, *, num_threads: int = 0
    ) -> None:
        self._dataset, self._collate = dataset, collate
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="own-samples") if num_threads else None

    def of(self, step: TrainStep) -> Iterator[tuple[Leaf, Any]]:
        """This rank's leaves of ``step``, each with its batch."""
        for leaf in step.leaves():
            yield leaf, self.batch(leaf)

    def batch(self, leaf: Leaf) -> Any:
        """The batch that ``leaf`` names, its tensors on the leaf's device. Raises DataError for a number too high."""
        numbers = leaf.sample_ids.tolist()
        if max(numbers) >= len(self._dataset):
            raise DataError(
                f"the index names sample {max(numbers)}, the dataset has {len(self._dataset)}: data.url is the index "
                "of another dataset, or this one has shrunk; write its index anew (workers.own_data.write_index)"
            )
        read = map if self._pool is None else self._pool.map
        return _moved(self._collate(list(read(self._dataset.__getitem__, numbers))), leaf.input_ids.device)


def _moved(batch: Any, device: torch.device) -> Any:
    """Tensors anywhere in lists, tuples and dicts; what is none stays as it is."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)):
        return batch.to(device)  # a tokenizer's BatchEncoding, say
    if isinstance(batch, dict):
        return type(batch)({name: _moved(value, device) for name, value in batch.items()})
    if isinstance(batch, list):
        return [_moved(value, device) for value in batch]
    if isinstance(batch, tuple):
        moved = [_moved(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else tuple(moved)
    return batch
