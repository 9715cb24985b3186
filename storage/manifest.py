"""The stored records: what a Shard, a Manifest and a Commit say, as strict, bounded models.

Pure data: no store is read or written here. Every count and size is bounded before anything is allocated from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

from storage.keys import MANIFESTS, Attempt, StepKey, commit_key, parse_record_key

__all__ = [
    "MANIFEST_VERSION",
    "MAX_CHUNKS",
    "MAX_RANKS",
    "SHARD_VERSION",
    "AttemptRecord",
    "ChunkIndex",
    "ChunkPlace",
    "Commit",
    "Frame",
    "LedgerRange",
    "Level",
    "Manifest",
    "ProbeRecord",
    "QuarantineRecord",
    "Receipt",
    "RowBlocks",
    "ShardIndex",
    "ShardRecord",
    "TensorLayout",
    "Tier",
]

MAX_CHUNKS: Final = 1 << 20
MAX_RANKS: Final = 1_000_000
MANIFEST_VERSION: Final = 1
SHARD_VERSION: Final = 1

Level = Literal["L1", "L2", "L3", "L4", "L5"]
Tier = Literal["own-memory", "peer-memory", "local-disk", "object-storage"]

Size = Annotated[int, Field(ge=0, lt=1 << 62)]
Shape = Annotated[tuple[Size, ...], Field(max_length=16)]
Name = Annotated[str, Field(min_length=1, max_length=1024)]


def _inside_the_run(key: str) -> str:
    if key.startswith("/") or ".." in key.split("/"):
        raise ValueError(f"key {key!r} points outside the run")
    return key


Key = Annotated[
    str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z0-9._/-]+$"), AfterValidator(_inside_the_run)
]
Digest64 = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Digest128 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AttemptRecord(_Record):
    """An Attempt as stored: number and owner nonce."""

    number: Size
    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]

    def value(self) -> Attempt:
        return Attempt(number=self.number, nonce=self.nonce)

    @staticmethod
    def of(attempt: Attempt) -> AttemptRecord:
        return AttemptRecord(number=attempt.number, nonce=attempt.nonce)


class Frame(_Record):
    """One independently encoded run of rows of a chunk: ``rows[0] <= row < rows[1]`` along dimension 0.

    A 0-dim chunk has the one row (0, 1). ``offset`` and ``stored_bytes`` locate the encoded bytes in the Shard object;
    ``digest`` is xxh3_64 of those stored bytes; ``raw_bytes`` is the exact size after decoding.
    """

    rows: tuple[Size, Size]
    offset: Size
    stored_bytes: Size
    raw_bytes: Size
    digest: Digest64


class ChunkIndex(_Record):
    """One contiguous block of one tensor inside a Shard object, with its frames in row order.

    ``bound`` is the promised bound of a lossy chunk, the relative L2 error of the next update; None means lossless.
    Such a chunk was rounded to ``mantissa_bits``; ``update_error`` is the error then found, its partner's included.
    """

    name: Name
    dtype: Name
    offsets: Shape
    sizes: Shape
    level: Level
    encoding: Literal["raw", "zstd", "shuffle-zstd", "planes-zstd"]
    bound: Annotated[float, Field(gt=0)] | None = None
    mantissa_bits: Annotated[int, Field(ge=1, le=23)] | None = None
    update_error: Annotated[float, Field(ge=0)] | None = None
    raw_digest: Digest64
    frames: Annotated[tuple[Frame, ...], Field(max_length=1 << 20)]


class ShardIndex(_Record):
    """The footer of a Shard object: every chunk and frame in it. Its own digest stands in the Manifest."""

    version: Literal[1] = SHARD_VERSION
    step: Size
    attempt: AttemptRecord
    rank: Size
    chunks: Annotated[tuple[ChunkIndex, ...], Field(max_length=1 << 20)]


class ShardRecord(_Record):
    """Where one rank's Shard object lies and how to check it.

    ``digest`` is xxh3_128 of the whole object, ``index_digest`` xxh3_128 of the ``index_bytes`` long footer JSON,
    which ends 24 bytes before the end of the object (see storage.frames).
    """

    rank: Size
    key: Key
    size: Size
    digest: Digest128
    index_bytes: Size
    index_digest: Digest128


class ChunkPlace(_Record):
    """One chunk of a tensor in the layout: which rank's Shard holds it."""

    rank: Size
    offsets: Shape
    sizes: Shape


class RowBlocks(_Record):
    """Chunks of a regular cut, in short: ``size`` rows of dimension ``dim`` each, the last one what is left.

    Block i is in the Shard of rank ``first_rank + i * rank_step``. Reads as the sequence of its ChunkPlaces, made one
    by one: 10,000 ranks times thousands of tensors would fill gigabytes written out.
    """

    shape: Shape
    dim: Annotated[int, Field(ge=0, lt=16)]
    size: Annotated[int, Field(ge=1, lt=1 << 62)]
    first_rank: Size
    rank_step: Size

    def __len__(self) -> int:
        return -(-self.shape[self.dim] // self.size)

    def __getitem__(self, index: int) -> ChunkPlace:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.size
        num = min(self.size, self.shape[self.dim] - start)
        # Checked as a whole: see storage.layout.
        return ChunkPlace.model_construct(
            rank=self.first_rank + index * self.rank_step,
            offsets=tuple(start if dim == self.dim else 0 for dim in range(len(self.shape))),
            sizes=(*self.shape[: self.dim], num, *self.shape[self.dim + 1 :]),
        )

    def __iter__(self) -> Iterator[ChunkPlace]:  # type: ignore[override]  # not the fields: the chunks
        return map(self.__getitem__, range(len(self)))


class TensorLayout(_Record):
    """The full tensor ``name`` and the chunks that cover it exactly once, one by one or as the rule that makes them.

    ``bound``: the largest that a lossy chunk of it promises (see `ChunkIndex`); None means lossless.
    """

    dtype: Name
    shape: Shape
    level: Level
    bound: Annotated[float, Field(gt=0)] | None = None
    chunks: Annotated[tuple[ChunkPlace, ...], Field(max_length=MAX_CHUNKS)] | RowBlocks


class LedgerRange(_Record):
    """Samples consumed so far: global positions ``[0, position)`` of the stream and the chained digest of their ids."""

    position: Size
    sample_chain: Digest128


class ProbeRecord(_Record):
    """Reserved for the proof of resume: a probe batch's stream position and its loss at save time."""

    position: Size
    loss: float


class Receipt(_Record):
    """Proof that one rank's Shard of one step is durable in one Tier, with all the Manifest needs to know of it.

    ``tensors`` lists this rank's chunks (``rank`` of each equals ``shard.rank``); ``shared_state`` is the replicated
    plain state and set by rank 0 alone; ``rank_state`` is this rank's own plain state. ``lossless_fallbacks`` counts
    chunks that were to be rounded and were kept exactly, as no rounding kept the bound. ``retries``: what of the
    upload had to be sent again: requests, parts, the whole.
    """

    model_config = ConfigDict(ser_json_inf_nan="constants")  # else a state's infinity is stored as null

    run_id: Name
    step: Size
    attempt: AttemptRecord
    world_size: Annotated[int, Field(ge=1, le=1_000_000)]
    tier: Tier = "object-storage"
    shard: ShardRecord
    tensors: dict[Name, TensorLayout]
    shared_state: dict[str, JsonValue] | None = None
    rank_state: dict[str, JsonValue] = Field(default_factory=dict)
    stall_s: float = 0.0
    encode_s: float = 0.0
    upload_s: float = 0.0
    retries: Size = 0
    lossless_fallbacks: Size = 0

    @property
    def step_key(self) -> StepKey:
        return StepKey(step=self.step, attempt=self.attempt.value())


class Manifest(_Record):
    """All Receipts of one step merged: everything needed to read it. Real only when a Commit names it."""

    model_config = ConfigDict(ser_json_inf_nan="constants")  # else a state's infinity is stored as null

    version: Literal[1] = MANIFEST_VERSION
    run_id: Name
    step: Size
    attempt: AttemptRecord
    world_size: Annotated[int, Field(ge=1, le=1_000_000)]
    time_utc: str
    shards: Annotated[tuple[ShardRecord, ...], Field(max_length=MAX_RANKS)]
    tensors: Annotated[dict[Name, TensorLayout], Field(max_length=MAX_CHUNKS)]
    shared_state: dict[str, JsonValue]
    rank_states: Annotated[tuple[dict[str, JsonValue], ...], Field(max_length=MAX_RANKS)]
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    ledger: LedgerRange | None = None
    probe: ProbeRecord | None = None
    lossless_fallbacks: Size = 0

    @property
    def step_key(self) -> StepKey:
        return StepKey(step=self.step, attempt=self.attempt.value())

    @property
    def stored_bytes(self) -> int:
        return sum(shard.size for shard in self.shards)


class Commit(_Record):
    """The single record that makes a Manifest real. Its writer is the one that stands in ``manifest_key``.

    ``base_step`` is the step its Attempt resumed from (0: from scratch). A Commit of an older Attempt at a step above
    a newer Attempt's base_step is no longer part of the Run's history.
    """

    version: Literal[1] = 1
    run_id: Name
    step: Size
    attempt: AttemptRecord
    base_step: Size
    time_utc: str
    manifest_key: Key
    manifest_bytes: Size
    manifest_digest: Digest128
    stored_bytes: Size
    loss: float | None = None
    metric: float | None = None

    @property
    def step_key(self) -> StepKey:
        return StepKey(step=self.step, attempt=self.attempt.value())

    @property
    def writer(self) -> str | None:
        """The process that wrote Manifest and Commit, by its nonce; None in the first format."""
        record = parse_record_key(self.manifest_key, MANIFESTS)
        return None if record is None else record.writer

    @property
    def object_key(self) -> str:
        """The name this Commit is stored under."""
        return commit_key(self.step_key, self.writer)


class QuarantineRecord(_Record):
    """Why a Checkpoint must not be read again: the failing object's key and what was wrong with it."""

    version: Literal[1] = 1
    step: Size
    attempt: AttemptRecord
    time_utc: str
    key: str
    reason: str
