"""The dataset before the first worker: opened and compared with the config, or made when the config says how."""

from __future__ import annotations

import logging
from collections.abc import Callable

from orchestrator.config import RunConfig
from orchestrator.errors import ConfigError
from storage.errors import ObjectMissing, StorageError
from storage.object_store import ObjectStore
from storage.open_store import open_store
from workers.data_errors import DataError
from workers.dataset_card import CARD_KEY, DatasetCard, load_card
from workers.prepare import prepare_dataset

__all__ = ["ensure_dataset"]

_log = logging.getLogger(__name__)


def ensure_dataset(config: RunConfig, note: Callable[[str], None]) -> DatasetCard:
    """The dataset's card; prepares the dataset first where ``data.prepare`` is given and nothing is there yet."""
    data = config.data
    try:
        store = open_store(data.url, config.checkpoint.store)
        card = load_card(store) if _has_card(store) else _prepare(config, note)
    except (DataError, StorageError) as error:
        raise ConfigError(data.url, (f"data.url cannot be used: {error}",)) from error
    problems = _problems(config, card)
    if problems:
        raise ConfigError(data.url, problems)
    return card


def _has_card(store: ObjectStore) -> bool:
    try:
        store.get(CARD_KEY)
    except ObjectMissing:
        return False
    return True


def _prepare(config: RunConfig, note: Callable[[str], None]) -> DatasetCard:
    data = config.data
    if data.prepare is None:
        text = f"data.url {data.url} holds no dataset: run `raysume data prepare`, or set data.prepare.source"
        raise ConfigError(data.url, (text,))
    note(f"preparing the dataset {data.url} from {data.prepare.source} (once)")
    last = {"stage": ""}

    def progress(stage: str, _done: int, total: int) -> None:
        if stage != last["stage"]:
            last["stage"] = stage
            note(f"data: {stage} over {total / 1e6:.0f} MB of text")

    try:
        card = prepare_dataset(
            data.prepare.source,
            data.url,
            sequence_length=data.sequence_length,
            vocab_size=data.prepare.vocab_size,
            max_bytes=data.prepare.max_bytes,
            seed=config.seed,
            validation_fraction=data.validation_fraction,
            store_config=config.checkpoint.store,
            progress=progress,
        )
    except (DataError, StorageError) as error:
        raise ConfigError(data.url, (f"data.prepare.source {data.prepare.source}: {error}",)) from error
    note(f"data: {card.num_train_rows} training rows of {card.sequence_length} tokens")
    return card


def _problems(config: RunConfig, card: DatasetCard) -> tuple[str, ...]:
    problems = []
    if card.sequence_length != config.data.sequence_length:
        problems.append(
            f"data.sequence_length is {config.data.sequence_length}, the dataset was packed to {card.sequence_length}"
        )
    vocabulary = config.model.config.get("vocab_size")
    if isinstance(vocabulary, int) and vocabulary < card.vocab_size:
        problems.append(f"model.config.vocab_size is {vocabulary}, the dataset's tokenizer has {card.vocab_size}")
    if card.num_train_rows < config.data.global_batch:
        problems.append(f"data.global_batch is {config.data.global_batch}, the dataset has {card.num_train_rows} rows")
    return tuple(problems)
