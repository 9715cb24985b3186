"""Makes a dataset from text: trains a byte-level BPE tokenizer or takes one, encodes every document, hands the ids on.

The same source, settings and library versions give the same fingerprint. Memory is bounded whatever the source's size.
Reading sources is `prepare_sources`, packing and files are `dataset_writer`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from storage.config import StoreConfig
from storage.errors import ObjectMissing
from storage.object_store import ObjectStore
from storage.open_store import open_store
from workers.data_errors import DataError
from workers.dataset_card import TOKENIZER_KEY, DataFormat, DatasetCard, SourceSummary
from workers.dataset_writer import DatasetWriter, refuse_existing
from workers.prepare_sources import Piece, Source, find_source

__all__ = ["END_OF_TEXT", "ProgressCallback", "prepare_dataset"]

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[str, int, int], None]
"""Called with the stage ('tokenizer' or 'encode'), bytes of text done, and bytes expected in all."""

END_OF_TEXT: Final = "<|endoftext|>"
END_OF_TEXT_ID: Final = 0  # the trainer numbers special tokens first
TOKENIZER_SAMPLE_BYTES: Final = 16 << 20
ENCODE_BATCH_BYTES: Final = 2 << 20
_OF_A_DATASET: Final = re.compile(rf"(train|validation)-\d{{5}}\.(parquet|arrow)|{re.escape(TOKENIZER_KEY)}")


def prepare_dataset(
    source: str,
    url: str,
    *,
    sequence_length: int,
    vocab_size: int,
    max_bytes: int | None = None,
    seed: int = 0,
    validation_fraction: float = 0.01,
    store_config: StoreConfig | None = None,
    row_group_rows: int | None = None,
    data_format: DataFormat = "parquet",
    tokenizer_of: str | None = None,
    progress: ProgressCallback | None = None,
) -> DatasetCard:
    """Make the dataset at ``url`` from ``source`` ('stdlib', or a file or folder). Raises DataError on bad input.

    ``tokenizer_of``: the dataset, or the tokenizer's file, whose tokenizer is taken; ``vocab_size`` is then its own.
    """
    config = store_config or StoreConfig()
    store = open_store(url, config)
    _refuse_occupied(store, config.deadline_s)
    found = find_source(source)
    total = found.num_bytes if max_bytes is None else min(found.num_bytes, max_bytes)
    report = progress or _no_progress
    if tokenizer_of is None:
        trained = _train_tokenizer(found, vocab_size=vocab_size, max_bytes=max_bytes, total=total, report=report)
        stored = trained.to_str(pretty=True).encode()
    else:
        stored = _stored_tokenizer(tokenizer_of, config)
    tokenizer = _load_tokenizer(stored, tokenizer_of or source)
    writer = DatasetWriter(
        store,
        sequence_length=sequence_length,
        vocab_size=tokenizer.get_vocab_size(),
        end_of_text_id=END_OF_TEXT_ID,
        validation_fraction=validation_fraction,
        seed=seed,
        row_group_rows=row_group_rows,
        data_format=data_format,
        deadline_s=config.deadline_s,
    )
    num_documents = num_bytes = 0
    for batch in _batches(found.pieces(max_bytes)):
        writer.append(_encode(tokenizer, batch))
        num_documents += sum(piece.is_last for piece in batch)
        num_bytes += sum(piece.num_bytes for piece in batch)
        report("encode", num_bytes, max(total, num_bytes))
    summary = SourceSummary(
        description=found.description,
        num_documents=num_documents,
        num_bytes=num_bytes,
        skipped_files=found.skipped_files,
    )
    return writer.finish(tokenizer=stored, source=summary)


def _refuse_occupied(store: ObjectStore, deadline_s: float) -> None:
    """Only an empty place will do, or one with what an interrupted prepare left; asked before the long work."""
    refuse_existing(store, deadline_s)
    foreign = [key for entry in store.list("", deadline_s=deadline_s) if not _OF_A_DATASET.fullmatch(key := entry.key)]
    if foreign:
        shown = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        raise DataError(f"{store.url} holds files that are no dataset: {shown}; choose an empty place")


def _stored_tokenizer(place: str, config: StoreConfig) -> bytes:
    """The tokenizer's bytes as they are, so that datasets which share it agree in its digest."""
    path = Path(place).expanduser()
    if "://" not in place and path.is_file():
        return path.read_bytes()
    try:
        return open_store(place, config).get(TOKENIZER_KEY, deadline_s=config.deadline_s)
    except ObjectMissing as error:
        raise DataError(f"{place} is neither a dataset with a {TOKENIZER_KEY} nor a tokenizer's file") from error


def _load_tokenizer(stored: bytes, place: str) -> Tokenizer:
    try:
        tokenizer: Tokenizer = Tokenizer.from_str(stored.decode())
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"no tokenizer that can be read: {error}", file=place) from error
    if tokenizer.token_to_id(END_OF_TEXT) != END_OF_TEXT_ID:
        raise DataError(f"the tokenizer's id {END_OF_TEXT_ID} is not {END_OF_TEXT}, which ends documents", file=place)
    # Text that spells the end-of-text mark is text, not the end of a document.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _no_progress(stage: str, done: int, total: int) -> None:
    """Nobody watches."""


def _train_tokenizer(
    source: Source, *, vocab_size: int, max_bytes: int | None, total: int, report: ProgressCallback
) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise DataError(f"the vocabulary size is {vocab_size}; byte-level BPE needs at least {len(alphabet) + 1}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(END_OF_TEXT, normalized=False, special=True)],
        # The library hands the alphabet out in an order that changes from process to process.
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    sample = _sample(source.pieces(max_bytes), total, report)
    tokenizer.train_from_iterator(sample, trainer=trainer)
    return tokenizer


def _sample(pieces: Iterator[Piece], total: int, report: ProgressCallback) -> Iterator[str]:
    """Every piece of a small source; of a large one an even share that the piece's place in it decides."""
    share = min(1.0, TOKENIZER_SAMPLE_BYTES / max(total, 1))
    done = 0
    for number, piece in enumerate(pieces):
        done += piece.num_bytes
        if share == 1.0 or xxhash.xxh3_64_intdigest(b"sample %d" % number) < share * 2.0**64:
            yield piece.text
        if number % 64 == 0:
            report("tokenizer", done, max(total, done))


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    waiting = 0
    for piece in pieces:
        batch.append(piece)
        waiting += piece.num_bytes
        if waiting >= ENCODE_BATCH_BYTES:
            yield batch
            batch, waiting = [], 0
    if batch:
        yield batch


def _encode(tokenizer: Tokenizer, batch: list[Piece]) -> npt.NDArray[np.int64]:
    encodings = tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
    ids: list[int] = []
    for piece, encoding in zip(batch, encodings, strict=True):
        ids += encoding.ids
        if piece.is_last:
            ids.append(END_OF_TEXT_ID)
    return np.array(ids, dtype=np.int64)
