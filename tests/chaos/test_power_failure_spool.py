"""Power failures under the local-disk Tier: no torn Shard is taken for a whole one, and none that was added is lost.

As in `test_power_failure`: the calls are recorded once, each seed makes one state that the disk may be in.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

import storage.spool
from storage.codec import digest128
from storage.config import LocalDiskConfig
from storage.direct_io import FileWriter
from storage.keys import StepKey, parse_shard_key, shard_key
from storage.manifest import AttemptRecord, Receipt, ShardRecord
from storage.spool import Spool
from storage.spool_files import drop_copy
from tests.fakes.checkpoints import RUN, attempt
from tests.fakes.power_failure_store import DiskRecord, Mark, materialise, recording

SEED = int(os.environ.get("RAYSUME_KILL_SEED", "20260917"))
RANKS = 2
PLACE = Path("disk") / "spool" / RUN / "node"


@pytest.fixture
def workplace() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="raysume-power-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    yield place
    shutil.rmtree(place)


def content_of(step: int, rank: int) -> bytes:
    return random.Random(step * RANKS + rank).randbytes(5000 + 700 * rank)


def receipt_of(step: int, rank: int) -> Receipt:
    content = content_of(step, rank)
    record = ShardRecord(
        rank=rank,
        key=key_of(step, rank),
        size=len(content),
        digest=digest128(content),
        index_bytes=0,
        index_digest=digest128(b""),
    )
    return Receipt(
        run_id=RUN, step=step, attempt=AttemptRecord.of(attempt()), world_size=RANKS, shard=record, tensors={}
    )


def key_of(step: int, rank: int) -> str:
    return shard_key(StepKey(step=step, attempt=attempt()), rank)


def number_of(key: str) -> int:
    parsed = parse_shard_key(key)
    assert parsed is not None
    return parsed[0].step * RANKS + parsed[1]


def opened(top: Path) -> Spool:
    return Spool(top / PLACE, LocalDiskConfig(directory=str(top / PLACE.parents[1]), keep_free_bytes=0), run_id=RUN)


def record_of_work(top: Path, *, honours_sync: bool = True) -> DiskRecord:
    """Two Keepers after one another: Shards added, uploaded and acknowledged, so that older ones are dropped."""
    top.mkdir()
    drop = drop_copy
    with recording(top, honours_sync=honours_sync) as record:

        def announced(directory: Path, key: str) -> None:
            record.mark("dropping", number_of(key))
            drop(directory, key)

        with patch.object(storage.spool, "drop_copy", announced):
            _work(record, range(1, 5))
            _work(record, range(5, 8))
    return record


def _work(record: DiskRecord, steps: range) -> None:
    spool = opened(record.top)
    for step in steps:
        for rank in range(RANKS):
            key, receipt = key_of(step, rank), receipt_of(step, rank)

            def write(file: FileWriter, step: int = step, rank: int = rank) -> Receipt:
                file.write(content_of(step, rank))
                return receipt_of(step, rank)

            spool.add(key, 10_000, write)
            record.mark("added", number_of(key))
            if step % 3:
                record.mark("uploading", number_of(key))
                spool.mark_uploaded(key, receipt)
                spool.mark_acknowledged(key)
    spool.close(remove=False)


def check_state(record: DiskRecord, seed: int, place: Path) -> None:
    cut = random.Random(seed).randint(0, len(record.events))
    target = place / f"state-{seed}"
    where = f"RAYSUME_KILL_SEED={SEED}, seed {seed}, power fails after {cut} of {len(record.events)} calls"
    try:
        said = materialise(record, cut, seed, target)
        spool = opened(target)
        _check_entries(spool, said, where)
        spool.close(remove=True)
        assert not (target / PLACE).exists(), f"{where}: {[*(target / PLACE).iterdir()]} stay"
    finally:
        shutil.rmtree(target)


def _check_entries(spool: Spool, said: list[Mark], where: str) -> None:
    heard = {word: {mark.value for mark in said if mark.word == word} for word in ("added", "dropping", "uploading")}
    there = set()
    for entry in spool.entries():
        there.add(number_of(entry.key))
        assert not entry.is_uploaded or number_of(entry.key) in heard["uploading"], f"{where}: {entry.key}"
        with spool.open(entry.key) as content:
            assert digest128(content) == entry.receipt.shard.digest, f"{where}: {entry.key} is torn"
    assert heard["added"] - heard["dropping"] <= there, f"{where}: lost"


def check_states(record: DiskRecord, states: int, place: Path) -> None:
    for number in range(states):
        check_state(record, SEED + number, place)


@pytest.mark.parametrize("states", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_torn_shard_is_taken_for_whole_and_none_is_lost(states: int, workplace: Path) -> None:
    check_states(record_of_work(workplace / "record"), states, workplace)


def test_a_disk_that_ignores_sync_is_found_out(workplace: Path) -> None:
    record = record_of_work(workplace / "record", honours_sync=False)
    with pytest.raises(AssertionError, match="RAYSUME_KILL_SEED"):
        check_states(record, 100, workplace)
