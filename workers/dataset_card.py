"""DatasetCard, the record that makes a folder a dataset, and its fingerprint.

The card is written last: a folder without ``dataset.json`` is not a dataset, whatever else lies in it. Nothing here
reads tokens.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from storage.errors import ObjectMissing
from storage.object_store import ObjectStore
from workers.data_errors import DataError

__all__ = [
    "CARD_KEY",
    "CARD_VERSION",
    "TOKENIZER_KEY",
    "DataFile",
    "DataFormat",
    "DatasetCard",
    "SourceSummary",
    "Split",
    "TokenType",
    "load_card",
    "make_fingerprint",
]

CARD_KEY: Final = "dataset.json"
TOKENIZER_KEY: Final = "tokenizer.json"
CARD_VERSION: Final = 1

Split = Literal["train", "validation"]
TokenType = Literal["uint16", "uint32"]
DataFormat = Literal["parquet", "arrow"]
Count = Annotated[int, Field(ge=0, lt=1 << 62)]
Digest128 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataFile(_Record):
    """One Parquet or Arrow IPC file. A row group is a record batch in the latter. Every row group holds
    ``DatasetCard.row_group_rows`` rows, the last of a file maybe fewer."""

    name: str = Field(pattern=r"^(train|validation)-\d{5}\.(parquet|arrow)$")
    split: Split
    rows: int = Field(ge=1)
    row_groups: int = Field(ge=1)
    size: int = Field(ge=1)
    digest: Digest128


class SourceSummary(_Record):
    """Where the text came from; says nothing that the fingerprint depends on."""

    description: str
    num_documents: Count
    num_bytes: Count
    skipped_files: tuple[str, ...] = ()


class DatasetCard(_Record):
    """Everything needed to read a dataset. A row is ``sequence_length + 1`` tokens; see `dataset_writer`."""

    version: Literal[1] = CARD_VERSION
    fingerprint: Digest128
    sequence_length: int = Field(ge=2)
    vocab_size: int = Field(ge=1, le=1 << 32, description="every id is below this; a model may have more")
    dtype: TokenType
    end_of_text_id: int = Field(ge=0)
    row_group_rows: int = Field(ge=1)
    num_train_rows: Count
    num_validation_rows: Count
    tokenizer_digest: Digest128
    source: SourceSummary
    files: tuple[DataFile, ...]

    def files_of(self, split: Split) -> tuple[DataFile, ...]:
        return tuple(file for file in self.files if file.split == split)

    @property
    def file_list(self) -> str:
        """Digest over names, sizes, row counts and contents of the training files, in order."""
        return _digest_files(self.files_of("train"))

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        for split, total in (("train", self.num_train_rows), ("validation", self.num_validation_rows)):
            rows = sum(file.rows for file in self.files if file.split == split)
            if rows != total:
                raise ValueError(f"{split} files hold {rows} rows, the card says {total}")
        for file in self.files:
            if file.row_groups != -(-file.rows // self.row_group_rows):
                raise ValueError(f"{file.name}: {file.row_groups} row groups do not fit {file.rows} rows")
        return self


def _digest_files(files: tuple[DataFile, ...]) -> str:
    lines = [f"{file.name} {file.size} {file.rows} {file.digest}" for file in files]
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())


def make_fingerprint(
    files: tuple[DataFile, ...], *, tokenizer_digest: str, sequence_length: int, vocab_size: int, row_group_rows: int
) -> str:
    """xxh3_128 over all files, the tokenizer and the packing. Equal data gives an equal fingerprint, anywhere."""
    packing = f"{sequence_length} {vocab_size} {row_group_rows}"
    return xxhash.xxh3_128_hexdigest(f"{_digest_files(files)}\n{tokenizer_digest}\n{packing}".encode())


def load_card(store: ObjectStore, *, deadline_s: float = 60.0) -> DatasetCard:
    """The card of the dataset at ``store``. Raises DataError when there is none or it is not readable."""
    try:
        raw = store.get(CARD_KEY, deadline_s=deadline_s)
    except ObjectMissing as error:
        raise DataError(
            f"{store.url} holds no dataset ({CARD_KEY} is missing; it is written last). "
            "Make one with `raysume data prepare`, or set data.prepare",
        ) from error
    try:
        return DatasetCard.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "card"
        raise DataError(f"not a dataset card this version reads: {place}: {first['msg']}", file=CARD_KEY) from error
