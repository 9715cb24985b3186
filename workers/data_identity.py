"""The identity of the training data as a Tracker: saved in every Checkpoint, compared on every resume.

It is all that decides which rows a position stands for: each source's files and packing, the sources, their order and
weights, the seed, the shuffle and the batch. Nothing here reads data.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

from workers.config import DataConfig
from workers.data_errors import DatasetChanged, FieldChange
from workers.dataset_card import DatasetCard
from workers.dataset_mix import TokenRows, order_of
from workers.sample_order import SampleOrder

__all__ = ["DATA_TRACKER", "DataIdentity", "changes", "identity_fields"]

_log = logging.getLogger(__name__)

DATA_TRACKER: Final = "data"

_MAX_OVERRIDES: Final = 64
_NOTHING: Final = "nothing"
_NOT_COMPARED: Final = ("order", "overrides", "sources")


class DataIdentity:
    """Raises DatasetChanged when a Checkpoint was made with other data, unless that is allowed; then it says so, and
    keeps what changed in every Checkpoint from there on."""

    def __init__(
        self, order: SampleOrder, cards: Sequence[DatasetCard], *, global_batch: int, allow_changed: bool
    ) -> None:
        self._now = identity_fields(order, cards, global_batch=global_batch)
        self._allow_changed = allow_changed
        self._overrides: list[dict[str, Any]] = []

    @classmethod
    def of(cls, rows: TokenRows, data: DataConfig, *, seed: int, allow_changed: bool) -> Self:
        """The identity of a Run with these settings on ``rows``."""
        order = order_of(rows, data, seed)
        return cls(order, rows.cards, global_batch=data.global_batch, allow_changed=allow_changed)

    def state_dict(self) -> dict[str, Any]:
        return self._now | {"overrides": list(self._overrides)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        found = changes(state_dict, self._now)
        if found and not self._allow_changed:
            raise DatasetChanged(found)
        before = list(state_dict.get("overrides", ()))
        new = [{"field": change.field, "saved": str(change.saved), "now": str(change.now)} for change in found]
        self._overrides = (before + new)[-_MAX_OVERRIDES:]
        for change in found:
            _log.warning("the data differs from the Checkpoint's, which is allowed: %s", change)


def identity_fields(order: SampleOrder, cards: Sequence[DatasetCard], *, global_batch: int) -> dict[str, Any]:
    """What a Checkpoint keeps, as plain values. ``cards`` are those of the order's sources."""
    fields: dict[str, Any] = {
        "total_rows": order.num_rows,
        "sequence_length": cards[0].sequence_length,
        "vocab_size": cards[0].vocab_size,
        "tokenizer": cards[0].tokenizer_digest,
        "seed": order.seed,
        "global_batch": global_batch,
        "shuffle": "rows" if order.shuffle == "rows" else f"blocks in windows of {order.window_blocks}",
        "order": order.as_fields(),
    }
    if len(cards) == 1:
        return fields | {"fingerprint": cards[0].fingerprint, "file_list": cards[0].file_list}
    return fields | {
        "sources": [
            {
                "name": source.name,
                "weight": weight,
                "total_rows": source.num_rows,
                "file_list": card.file_list,
                "fingerprint": card.fingerprint,
            }
            for source, weight, card in zip(order.sources, order.weights, cards, strict=True)
        ]
    }


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[FieldChange, ...]:
    """Every field of ``now`` that differs, by name; those of a source that both have as ``sources.NAME.FIELD``."""
    flat_saved, flat_now = _flat(saved), _flat(now)
    both = _names(saved) & _names(now)
    found = []
    for field, value in flat_now.items():
        _, _, of_source = field.partition("sources.")
        if of_source and of_source.rpartition(".")[0] not in both:
            continue  # an added source is named by the list of sources
        before = flat_saved.get(field, _NOTHING)
        if before != value:
            found.append(FieldChange(field=field, saved=before, now=value))
    # A fingerprint says only that something differs: name it alone when nothing finer does.
    return tuple(change for change in found if not change.field.endswith("fingerprint")) or tuple(found)


def _names(fields: Mapping[str, Any]) -> set[str]:
    return {source["name"] for source in fields.get("sources", ())}


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    flat = {"shuffle": "rows"} | {field: value for field, value in fields.items() if field not in _NOT_COMPARED}
    sources = fields.get("sources", ())
    flat["sources"] = ", ".join(source["name"] for source in sources) or "one"
    for source in sources:
        flat |= {f"sources.{source['name']}.{field}": value for field, value in source.items() if field != "name"}
    return flat
