"""Power failures under real storage code: whatever was not synced is lost or reordered, Commits stay whole.

The calls of one run of saves, retention and sweeps are recorded once; each seed cuts the record somewhere and makes
one of the states that a disk may be in. RAYSUME_KILL_SEED repeats a run; --slow looks at many more states.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from storage.commit_log import CommitLog
from storage.config import CheckpointConfig
from storage.direct import DirectKeeper
from storage.keys import StepKey
from storage.local_store import LocalStore
from tests.chaos.kill_points import attempt_of
from tests.chaos.killed_lives import LifeRecord, Witness
from tests.fakes.power_failure_store import DiskRecord, Mark, materialise, recording
from tests.fakes.recording_sink import RecordingSink
from tests.fakes.saving import committer_for, save_all_ranks

Recorder = Callable[[str, object], None]

SEED = int(os.environ.get("RAYSUME_KILL_SEED", "20260917"))
ROOT = Path("volume") / "runs" / "run"  # folders that do not exist either
WORLD = 2


@pytest.fixture(scope="module")
def workplace() -> Iterator[Path]:
    """In memory: what is slow on a disk, its fsync, is modelled here and needs no disk."""
    place = Path(tempfile.mkdtemp(prefix="raysume-power-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    yield place
    shutil.rmtree(place)


def record_of_work(top: Path, *, honours_sync: bool = True) -> DiskRecord:
    """Two Attempts: saves with retention, then a save that is cut off, then saves, retention and sweeps of orphans."""
    top.mkdir()
    with recording(top, honours_sync=honours_sync) as record:
        uncommit = CommitLog.uncommit

        def announced(self: CommitLog, key: StepKey) -> None:
            record.mark("uncommitting", key.step)
            uncommit(self, key)

        with patch.object(CommitLog, "uncommit", announced):
            _work(record, attempt=1, first=1, last=5)
            _work(record, attempt=2, first=6, last=9)
    return record


def _work(record: DiskRecord, *, attempt: int, first: int, last: int) -> None:
    store, sink = LocalStore(record.top / ROOT), RecordingSink()
    committer = committer_for(store, orphan_grace_s=0.0)
    committer.sweep_dead(attempt_of(attempt))
    with DirectKeeper(store, sink, CheckpointConfig()) as keeper:
        save = partial(
            save_all_ranks,
            committer,
            keeper,
            sink,
            attempt=attempt_of(attempt),
            base_step=first - 1,
            world_size=WORLD,
        )
        for step in range(first, last + 1):
            save(step=step)
            record.mark("committed", step)
            committer.retain()
        with patch.object(committer, "commit"):  # dies before its Commit
            save(step=last + 1)


def heard(marks: list[Mark]) -> LifeRecord:
    said = LifeRecord()
    for mark in marks:
        getattr(said, mark.word).append(mark.value)
    return said


def check_state(record: DiskRecord, seed: int, place: Path, *, save: bool) -> None:
    """One state after one power failure: all that was acknowledged is there and good, and the next save works."""
    cut = random.Random(seed).randint(0, len(record.events))
    target = place / f"state-{seed}"
    where = f"RAYSUME_KILL_SEED={SEED}, seed {seed}, power fails after {cut} of {len(record.events)} calls"
    try:
        witness = Witness(LocalStore(target / ROOT))
        witness.hear(heard(materialise(record, cut, seed, target)))
        witness.check(where)
        if save:
            witness.save_next(3, WORLD, where)
    finally:
        shutil.rmtree(target)


def check_states(record: DiskRecord, states: int, place: Path) -> None:
    for number in range(states):
        check_state(record, SEED + number, place, save=number % 4 == 0)


@pytest.mark.parametrize("states", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_what_was_committed_outlives_a_power_failure(states: int, workplace: Path, record_property: Recorder) -> None:
    record = record_of_work(workplace / f"record-{states}")
    check_states(record, states, workplace)
    record_property("seeded", f"RAYSUME_KILL_SEED={SEED}: {states} states of {len(record.events)} recorded calls")


def test_a_disk_that_ignores_sync_is_found_out(workplace: Path) -> None:
    record = record_of_work(workplace / "record-unsynced", honours_sync=False)
    with pytest.raises(AssertionError, match="RAYSUME_KILL_SEED"):
        check_states(record, 100, workplace)
