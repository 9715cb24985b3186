"""The records of which Checkpoints were verified after their Commit, by what means, and with what result.

A record says that nothing was wrong; what is found wrong is quarantined instead. Nobody's choice of a Checkpoint to
resume from depends on it, and a reader of an older release does not look here.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from storage.errors import ObjectMissing
from storage.keys import VERIFIED, StepKey, parse_record_key, verified_key
from storage.manifest import AttemptRecord
from storage.object_store import ObjectStore

__all__ = ["Means", "VerifiedRecord", "read_verified", "verified_keys", "verified_records", "write_verified"]

_MAX_BYTES: Final = 64 << 10
_PARALLEL: Final = 8

Means = Literal["digests", "load"]
"""Every digest was checked; with "load" the state was also loaded, and its probe, where it has one, taken again."""


class VerifiedRecord(BaseModel):
    """``loss`` and ``expected``: of the probe, None where there was none to take. ``note``: why no more was done."""

    model_config = ConfigDict(extra="ignore", frozen=True, ser_json_inf_nan="constants")

    version: Literal[1] = 1
    step: int
    attempt: AttemptRecord
    time_utc: str
    by: Means
    loss: float | None = None
    expected: float | None = None
    note: str | None = None

    @property
    def step_key(self) -> StepKey:
        return StepKey(step=self.step, attempt=self.attempt.value())


def write_verified(store: ObjectStore, record: VerifiedRecord) -> None:
    store.put(verified_key(record.step_key), record.model_dump_json().encode())


def read_verified(store: ObjectStore, key: StepKey) -> VerifiedRecord | None:
    """None where there is none that this release can read."""
    try:
        content = store.get(verified_key(key))
    except ObjectMissing:
        return None
    if len(content) > _MAX_BYTES:
        return None
    try:
        record = VerifiedRecord.model_validate_json(content)
    except ValidationError:
        return None
    return record if record.step_key == key else None


def verified_keys(store: ObjectStore) -> frozenset[StepKey]:
    """Which Checkpoints have a record, by the names alone: one listing."""
    found = (parse_record_key(entry.key, VERIFIED) for entry in store.list(VERIFIED))
    return frozenset(record.step_key for record in found if record is not None)


def verified_records(store: ObjectStore, keys: Iterable[StepKey]) -> dict[StepKey, VerifiedRecord]:
    """The records of ``keys``, side by side."""
    wanted = sorted(verified_keys(store) & set(keys))
    if not wanted:
        return {}
    with ThreadPoolExecutor(min(_PARALLEL, len(wanted)), thread_name_prefix="verified") as pool:
        records = pool.map(lambda key: read_verified(store, key), wanted)
        return {key: record for key, record in zip(wanted, records, strict=True) if record is not None}
