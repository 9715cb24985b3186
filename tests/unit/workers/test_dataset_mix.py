"""Several sources as one body of rows, and a stream over them. Datasets live in memory."""

from __future__ import annotations

import pickle
import uuid
from collections import Counter
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from storage.config import StoreConfig
from storage.open_store import open_store
from tests.fakes.token_datasets import write_numbered_rows
from workers.config import DataConfig, SourceConfig
from workers.data_errors import DataError
from workers.dataset_mix import TokenRows, open_rows, order_of
from workers.stream import LeafStream, validation_leaves

VOCABULARY = 1000


def source(num_rows: int, first_token: int, weight: float = 1, **options: Any) -> SourceConfig:
    """A source whose row ``i`` holds the token ``first_token + i`` throughout."""
    url = f"memory://{uuid.uuid4()}"
    write_numbered_rows(url, num_rows, first_token=first_token, **({"vocab_size": VOCABULARY} | options))
    return SourceConfig(url=url, weight=weight)


def config_of(*sources: SourceConfig, **changes: Any) -> DataConfig:
    return DataConfig(**({"sources": sources, "sequence_length": 4, "global_batch": 8, "micro_batch": 2} | changes))


def opened(data: DataConfig, split: str = "train") -> TokenRows:
    return open_rows(data, split, StoreConfig())  # type: ignore[arg-type]


def tokens_of(data: DataConfig, world_size: int, steps: range) -> list[int]:
    """First tokens of all rows of ``steps``, in stream order, over all ranks."""
    rows = opened(data)
    found: dict[tuple[int, int], list[int]] = {}
    for rank in range(world_size):
        with LeafStream(rows, data, 3, rank, world_size) as stream:
            stream.seek(steps.start)
            for step in steps:
                for leaf in stream.leaves(step):
                    if not leaf.is_surplus:
                        found[step, leaf.index] = leaf.input_ids[:, 0].tolist()
    return [token for place in sorted(found) for token in found[place]]


def test_ids_count_through_the_sources_in_their_order() -> None:
    rows = opened(config_of(source(5, 100), source(3, 200), source(4, 300)))
    asked = [11, 0, 5, 7, 4, 8]
    assert rows.rows(asked)[:, 0].tolist() == [303, 100, 200, 202, 104, 300]
    assert rows.num_rows == 12
    assert pickle.loads(pickle.dumps(rows)).rows(asked).tolist() == rows.rows(asked).tolist()
    with pytest.raises(DataError, match="splits of 12 rows"):
        rows.rows([12])


@pytest.mark.parametrize("shuffle", ["rows", "blocks"])
def test_each_step_has_the_exact_mix_and_each_source_its_own_epochs(shuffle: str) -> None:
    data = config_of(source(12, 100, 0.75), source(4, 200, 0.25), shuffle=shuffle, shuffle_window_groups=2)
    tokens = tokens_of(data, 1, range(1, 5))
    for step in range(4):
        assert sum(token >= 200 for token in tokens[8 * step : 8 * step + 8]) == 2
    assert Counter(tokens) == Counter({100 + row: 2 for row in range(12)} | {200 + row: 2 for row in range(4)})


@pytest.mark.parametrize("shuffle", ["rows", "blocks"])
def test_a_mix_does_not_depend_on_the_world_size_nor_on_where_it_was_taken_up(shuffle: str) -> None:
    data = config_of(source(13, 100, 3), source(7, 200, 2), shuffle=shuffle, shuffle_window_groups=2)
    unbroken = tokens_of(data, 1, range(1, 9))
    assert tokens_of(data, 3, range(1, 9)) == unbroken
    assert tokens_of(data, 4, range(1, 4)) + tokens_of(data, 2, range(4, 6)) + tokens_of(data, 1, range(6, 9)) == (
        unbroken
    )


def test_what_a_stream_gives_is_what_its_order_says() -> None:
    data = config_of(source(13, 100, 3), source(7, 200, 2))
    rows = opened(data)
    ids = order_of(rows, data, 3).ids(0, 64)
    assert tokens_of(data, 2, range(1, 9)) == rows.rows(ids)[:, 0].tolist()


def test_sources_that_do_not_fit_together_are_refused_by_name() -> None:
    fine = source(5, 100)
    other_vocabulary = source(5, 0, vocab_size=512)
    other_tokenizer = source(5, 0, tokenizer=b"[]")
    longer = source(5, 0, sequence_length=5)
    for other, field in ((other_vocabulary, "vocabulary"), (other_tokenizer, "tokenizer"), (longer, "sequence_length")):
        with pytest.raises(DataError, match=f"do not agree in {field}: .* has .*, .* has ") as caught:
            opened(config_of(fine, other))
        assert other.label in str(caught.value)


def test_a_bad_row_of_one_source_names_its_file() -> None:
    bad = source(8, 100)
    rows = opened(config_of(source(8, 0), bad))
    open_store(bad.url).delete(["train-00000.parquet"])
    assert rows.rows([0]).shape == (1, 5)
    with pytest.raises(DataError, match=r"train-00000\.parquet: the file is missing"):
        rows.rows([8])


def test_evaluation_takes_rows_of_all_sources_by_turns() -> None:
    data = config_of(
        source(4, 100, 2, validation_rows=6),
        source(4, 200, 1, validation_rows=6),
        source(4, 300, 5),
        micro_batch=3,
        global_batch=6,
    )
    held_out = opened(data, "validation")
    leaves = list(validation_leaves(held_out, 3, 3, 0, 1))
    tokens = [leaf.input_ids[:, 0].tolist() for leaf in leaves]
    assert tokens == [[104, 204, 105], [106, 205, 107], [108, 206, 109]]
    assert sorted(held_out.in_turn(np.arange(12)).tolist()) == list(range(12))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "memory://x"}, "exactly one of data.url and data.sources"),
        ({"sources": ()}, "exactly one of data.url and data.sources"),
        ({"prepare": {}}, "each source has a prepare of its own"),
        ({"sources": [{"url": "a/x"}, {"url": "b/x/"}]}, "called alike, give each a name of its own: x, x"),
        ({"sources": [{"url": "a", "weight": 0.123456}, {"url": "b"}]}, "use rounder weights"),
        ({"num_workers": 1, "prefetch": 0}, "data.prefetch is at least 1"),
    ],
)
def test_settings_that_name_no_mix_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config_of(SourceConfig(url="a"), SourceConfig(url="b"), **changes)


def test_one_source_of_a_mix_is_the_same_as_a_url() -> None:
    one = source(9, 0)
    listed = config_of(one)
    plain = config_of(sources=(), url=one.url)
    assert tokens_of(listed, 1, range(1, 5)) == tokens_of(plain, 1, range(1, 5))
