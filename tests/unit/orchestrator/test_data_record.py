"""What an audit is made from: out of a Manifest, into a file and back, and never a crash over a damaged one."""

from __future__ import annotations

import random

import pytest

from orchestrator.data_record import DataRecord, audit_record, exported, record_in, record_of
from storage.manifest import Manifest
from tests.fakes.checkpoints import prepare
from tests.fakes.sample_history import random_history
from workers.ledger import LedgerUnreadable


def record(seed: int) -> DataRecord:
    history = random_history(seed, lives=6)
    return DataRecord(run_id="run", attempt=history.attempt, claims=history.claims, ledger=history.ledger)


@pytest.mark.parametrize("seed", range(3))
def test_an_exported_record_reads_back_the_same(seed: int) -> None:
    assert record_in(exported(record(seed))) == record(seed)


def test_a_record_without_a_ledger_is_exported_too() -> None:
    without = DataRecord(run_id="run", attempt=1, claims=record(0).claims, ledger=None, batch=8, leaf=4)
    assert record_in(exported(without)) == without
    assert audit_record(without, told={}) is None


def test_a_training_state_without_progress_is_refused() -> None:
    manifest: Manifest = prepare(10).manifest()
    with pytest.raises(LedgerUnreadable, match="no progress"):
        record_of(manifest)


@pytest.mark.parametrize("seed", range(36))
def test_a_damaged_file_is_refused_or_not_proven_and_never_crashes(seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(exported(record(seed % 3)).encode())
    match seed % 3:
        case 0:
            data[rng.randrange(len(data))] = rng.randrange(32, 127)
        case 1:
            start = rng.randrange(len(data))
            del data[start : start + rng.randint(1, 40)]
        case _:
            lines = data.split(b"\n")
            lines.insert(rng.randrange(len(lines)), rng.choice(lines) if seed % 2 else b"[" * 20_000)
            data = bytearray(b"\n".join(lines))
    try:
        report = audit_record(record_in(data.decode()), told={})
    except (LedgerUnreadable, ValueError):
        return
    assert report is not None
    if report.is_proven:  # what was hit is a name, or something that only people read
        assert (report.missing, report.repeated) == (0, 0)
