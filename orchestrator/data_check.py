"""The datasets before the first worker: opened and compared with the config, or made when the config says how."""

from __future__ import annotations

import logging
from collections.abc import Callable

from orchestrator.config import RunConfig
from orchestrator.errors import ConfigError
from storage.errors import ObjectMissing, StorageError
from storage.object_store import ObjectStore
from storage.open_store import open_store
from workers.config import PrepareConfig, SourceConfig
from workers.data_errors import DataError
from workers.dataset_card import CARD_KEY, DatasetCard, load_card
from workers.dataset_mix import disagreements
from workers.prepare import prepare_dataset

__all__ = ["check_datasets", "ensure_dataset"]

_log = logging.getLogger(__name__)


def ensure_dataset(config: RunConfig, note: Callable[[str], None]) -> tuple[DatasetCard, ...]:
    """The card of each source; prepares a dataset first where ``prepare`` is given and nothing is there yet.

    All sources but the first take the first one's tokenizer when they are prepared: they have to have one.
    """
    sources = config.data.mix
    cards: list[DatasetCard] = []
    for source in sources:
        cards.append(_ensure(config, source, sources[0].url if cards else None, note))
    _require_fitting(config, cards)
    return tuple(cards)


def check_datasets(config: RunConfig) -> None:
    """Raises the ConfigError of `ensure_dataset` where what is there shows it; prepares nothing."""
    there: list[DatasetCard] = []
    for source in config.data.mix:
        card = _existing(config, source)
        if card is None:
            _preparation(config, source)
        else:
            there.append(card)
    if len(there) == len(config.data.mix):
        _require_fitting(config, there)


def _require_fitting(config: RunConfig, cards: list[DatasetCard]) -> None:
    sources = config.data.mix
    problems = (*disagreements([source.label for source in sources], cards), *_problems(config, cards))
    if problems:
        raise ConfigError(", ".join(source.url for source in sources), problems)


def _ensure(
    config: RunConfig, source: SourceConfig, tokenizer_of: str | None, note: Callable[[str], None]
) -> DatasetCard:
    card = _existing(config, source)
    if card is not None:
        return card
    prepare = _preparation(config, source)
    try:
        return _prepare(config, source, prepare, tokenizer_of, note)
    except (DataError, StorageError) as error:
        text = f"{_key(config)}.prepare.source {prepare.source}: {error}"
        raise ConfigError(source.url, (text,)) from error


def _existing(config: RunConfig, source: SourceConfig) -> DatasetCard | None:
    """The card of a dataset that is there; None where there is none."""
    try:
        store = open_store(source.url, config.checkpoint.store)
        return load_card(store) if _has_card(store) else None
    except (DataError, StorageError) as error:
        raise ConfigError(source.url, (f"{_key(config)}.url cannot be used: {error}",)) from error


def _preparation(config: RunConfig, source: SourceConfig) -> PrepareConfig:
    """How a dataset that is not there is made."""
    key = _key(config)
    if source.prepare is None:
        text = f"{key}.url {source.url} holds no dataset: run `raysume data prepare`, or set {key}.prepare.source"
        raise ConfigError(source.url, (text,))
    return source.prepare


def _key(config: RunConfig) -> str:
    return "data.sources" if config.data.sources else "data"


def _has_card(store: ObjectStore) -> bool:
    try:
        store.get(CARD_KEY)
    except ObjectMissing:
        return False
    return True


def _prepare(
    config: RunConfig,
    source: SourceConfig,
    prepare: PrepareConfig,
    tokenizer_of: str | None,
    note: Callable[[str], None],
) -> DatasetCard:
    data = config.data
    note(f"preparing the dataset {source.url} from {prepare.source} (once)")
    last = {"stage": ""}

    def progress(stage: str, _done: int, total: int) -> None:
        if stage != last["stage"]:
            last["stage"] = stage
            note(f"data: {stage} over {total / 1e6:.0f} MB of text")

    card = prepare_dataset(
        prepare.source,
        source.url,
        sequence_length=data.sequence_length,
        vocab_size=prepare.vocab_size,
        max_bytes=prepare.max_bytes,
        seed=config.seed,
        validation_fraction=data.validation_fraction,
        store_config=config.checkpoint.store,
        data_format=prepare.format,
        tokenizer_of=tokenizer_of,
        progress=progress,
    )
    note(f"data: {card.num_train_rows} training rows of {card.sequence_length} tokens")
    return card


def _problems(config: RunConfig, cards: list[DatasetCard]) -> tuple[str, ...]:
    card, num_rows = cards[0], sum(card.num_train_rows for card in cards)
    problems = []
    if card.sequence_length != config.data.sequence_length:
        problems.append(
            f"data.sequence_length is {config.data.sequence_length}, the dataset was packed to {card.sequence_length}"
        )
    vocabulary = config.model.config.get("vocab_size")
    if isinstance(vocabulary, int) and vocabulary < card.vocab_size:
        problems.append(f"model.config.vocab_size is {vocabulary}, the dataset's tokenizer has {card.vocab_size}")
    if num_rows < config.data.global_batch:
        problems.append(f"data.global_batch is {config.data.global_batch}, the dataset has {num_rows} rows")
    return tuple(problems)
