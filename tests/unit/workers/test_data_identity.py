"""The data's identity as a Tracker: what changed is refused by name, and what is allowed is recorded."""

from __future__ import annotations

import logging
import pickle
import uuid
from typing import Any

import pytest

from storage.config import StoreConfig
from tests.fakes.token_datasets import write_numbered_rows
from workers.config import DataConfig, SourceConfig
from workers.data_errors import DatasetChanged
from workers.data_identity import DataIdentity, changes
from workers.dataset_card import DatasetCard
from workers.dataset_mix import open_rows
from workers.sample_order import SampleOrder, SourceRows


def order_of(*cards: DatasetCard, weights: tuple[int, ...] = (1, 1, 1), seed: int = 1, **options: Any) -> SampleOrder:
    names = ("wiki", "code", "books") if len(cards) > 1 else ("data",)
    sources = tuple(
        SourceRows(name=name, num_rows=card.num_train_rows, weight=weight, block_rows=card.row_group_rows)
        for name, card, weight in zip(names, cards, weights, strict=False)
    )
    return SampleOrder(seed=seed, sources=sources, **options)


def identity(
    *cards: DatasetCard,
    order: SampleOrder | None = None,
    global_batch: int = 4,
    allow_changed: bool = False,
    seed: int = 1,
) -> DataIdentity:
    return DataIdentity(
        order or order_of(*cards, seed=seed), cards, global_batch=global_batch, allow_changed=allow_changed
    )


def rows(num_rows: int, **options: Any) -> DatasetCard:
    return write_numbered_rows(f"memory://{uuid.uuid4()}", num_rows, **options)


def changed(before: DataIdentity, now: DataIdentity) -> dict[str, tuple[object, object]]:
    with pytest.raises(DatasetChanged, match=r"data\.allow_changed") as caught:
        now.load_state_dict(before.state_dict())
    for change in caught.value.changes:
        assert change.field in str(caught.value)
    return {change.field: (change.saved, change.now) for change in caught.value.changes}


def test_the_same_data_is_taken_wherever_it_lies() -> None:
    identity(write_numbered_rows("memory://identity-a", 8)).load_state_dict(
        identity(write_numbered_rows("memory://identity-b", 8)).state_dict()
    )


def test_one_more_file_that_sorts_first_changes_the_file_list_and_the_rows() -> None:  # case B49 (a)
    card = rows(20)
    first = card.files[0].model_copy(update={"name": "train-00009.parquet"})
    grown = card.model_copy(update={"files": (first, *card.files), "num_train_rows": 28})
    found = changed(identity(card), identity(grown))
    assert found == {"file_list": (card.file_list, grown.file_list), "total_rows": (20, 28)}


def test_fewer_rows_are_refused_although_the_position_would_still_be_a_row_of_them() -> None:  # case B49 (b)
    assert set(changed(identity(rows(20)), identity(rows(10)))) >= {"file_list", "total_rows"}


def test_another_seed_batch_packing_or_shuffle_is_refused_by_name() -> None:  # case B49 (c)
    card = rows(20)
    assert changed(identity(card), identity(card, seed=2)) == {"seed": (1, 2)}
    assert changed(identity(card), identity(card, global_batch=8)) == {"global_batch": (4, 8)}
    assert set(changed(identity(card), identity(rows(20, sequence_length=5)))) >= {"file_list", "sequence_length"}
    blocks = identity(card, order=order_of(card, shuffle="blocks", window_blocks=3))
    assert changed(identity(card), blocks) == {"shuffle": ("rows", "blocks in windows of 3")}
    wider = identity(card, order=order_of(card, shuffle="blocks", window_blocks=4))
    assert changed(blocks, wider) == {"shuffle": ("blocks in windows of 3", "blocks in windows of 4")}


def test_a_fingerprint_that_alone_differs_is_named() -> None:
    card = rows(20)
    assert set(changed(identity(card), identity(card.model_copy(update={"fingerprint": "0" * 32})))) == {"fingerprint"}


def test_a_checkpoint_that_says_nothing_of_the_data_is_refused() -> None:
    with pytest.raises(DatasetChanged, match=r"file_list \(saved nothing"):
        identity(rows(20)).load_state_dict({})


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ({"weights": (3, 1)}, {"sources.wiki.weight": (2, 3)}),
        ({"cards": 3}, {"sources": ("wiki, code", "wiki, code, books"), "total_rows": (28, 40)}),
        ({"cards": 1}, {"sources": ("wiki, code", "one")}),
        ({"turned": True}, {"sources": ("wiki, code", "code, wiki")}),
        ({"other": True}, {"sources.code.file_list": None, "sources.code.total_rows": (8, 12)}),
    ],
)
def test_a_changed_mix_is_refused_by_the_name_of_what_changed(  # the kind of case B49
    now: dict[str, Any], expected: dict[str, object]
) -> None:
    wiki, code, books = rows(20), rows(8), rows(12)
    before = identity(wiki, code, order=order_of(wiki, code, weights=(2, 1)))
    if "turned" in now:
        order = order_of(wiki, code, weights=(2, 1))
        turned = SampleOrder(seed=1, sources=order.sources[::-1])
        after = identity(code, wiki, order=turned)
    elif "other" in now:
        after = identity(wiki, books, order=order_of(wiki, books, weights=(2, 1)))
    else:
        cards = (wiki, code, books)[: now.get("cards", 2)]
        after = identity(*cards, order=order_of(*cards, weights=now.get("weights", (2, 1, 1))))
    found = changed(before, after)
    assert expected.keys() <= found.keys()
    assert {field: value for field, value in found.items() if expected.get(field)} == {
        field: value for field, value in expected.items() if value
    }


def test_weights_of_the_same_ratio_are_the_same_mix() -> None:
    cards = rows(20), rows(8)
    before = identity(*cards, order=order_of(*cards, weights=(2, 1)))
    identity(*cards, order=order_of(*cards, weights=(4, 2))).load_state_dict(before.state_dict())


def test_a_change_that_is_allowed_is_said_aloud_and_recorded_in_every_later_checkpoint(  # case B49
    caplog: pytest.LogCaptureFixture,
) -> None:
    card = rows(20)
    second = identity(card, seed=2, allow_changed=True)
    with caplog.at_level(logging.WARNING):
        second.load_state_dict(identity(card).state_dict())
    assert "seed (saved 1, now 2)" in caplog.text
    third = identity(card, seed=2)
    third.load_state_dict(second.state_dict())
    assert third.state_dict()["overrides"] == [{"field": "seed", "saved": "1", "now": "2"}]
    fourth = identity(card, seed=2, global_batch=8, allow_changed=True)
    fourth.load_state_dict(third.state_dict())
    assert [one["field"] for one in fourth.state_dict()["overrides"]] == ["seed", "global_batch"]


def test_a_checkpoint_from_before_mixes_is_taken() -> None:
    card = rows(20)
    old = {
        "fingerprint": card.fingerprint,
        "file_list": card.file_list,
        "total_rows": 20,
        "sequence_length": card.sequence_length,
        "vocab_size": card.vocab_size,
        "tokenizer": card.tokenizer_digest,
        "seed": 1,
        "global_batch": 4,
    }
    identity(card).load_state_dict(old)


def test_the_refusal_survives_pickling() -> None:
    with pytest.raises(DatasetChanged) as caught:
        identity(rows(20)).load_state_dict({})
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.changes) == (str(caught.value), caught.value.changes)


def test_a_config_of_several_sources_has_the_identity_of_its_mix() -> None:
    for name in ("x", "y"):
        write_numbered_rows(f"memory://mixed-{name}", 10)
    data = DataConfig(
        sources=(SourceConfig(url="memory://mixed-x", weight=0.75), SourceConfig(url="memory://mixed-y", weight=0.25)),
        sequence_length=4,
        global_batch=4,
    )
    found = DataIdentity.of(open_rows(data, "train", StoreConfig()), data, seed=1, allow_changed=False).state_dict()
    assert [(one["name"], one["weight"], one["total_rows"]) for one in found["sources"]] == [
        ("mixed-x", 3, 10),
        ("mixed-y", 1, 10),
    ]
    assert changes(found, found) == ()
