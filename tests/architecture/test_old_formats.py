"""Checkpoints that earlier versions wrote are read, gone on from, and cleaned up. The stored trees stay as they are.

`old_formats/version_1`: records without a writer in their names; steps 10, 20, 25 (of a second Attempt that went on
from 20) and a quarantined 30.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from storage.commit_log import CommitLog
from storage.keys import Attempt
from storage.local_store import LocalStore
from storage.restore import plan_restore
from storage.sweeper import sweep
from storage.verify import verify_commit
from tests.fakes.checkpoints import RUN, attempt, save

TREE = Path(__file__).parent / "old_formats" / "version_1"
NEXT = Attempt(number=3, nonce="00000003")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    shutil.copytree(TREE, tmp_path / "run")
    return LocalStore(str(tmp_path / "run"))


def test_an_old_run_is_listed_and_verifies_to_the_last_byte(store: LocalStore) -> None:
    log = CommitLog(store, RUN)
    assert [(commit.step, commit.attempt.number, commit.writer) for commit in log.commits()] == [
        (10, 1, None),
        (20, 1, None),
        (25, 2, None),
    ]
    assert log.commits()[1].metric == 0.5
    assert [record.reason for record in log.quarantined().values()] == ["missing file"]
    for commit in log.all_commits():
        assert verify_commit(store, log, commit).problems == ()


def test_an_old_run_goes_on_under_new_names(store: LocalStore) -> None:
    log = CommitLog(store, RUN)
    plan = plan_restore(log, attempt=NEXT)
    assert plan is not None
    assert plan.manifest_key == "manifests/step-0000000025.a000002-00000002.json"
    newest = save(store, 35, by=NEXT, base_step=plan.step)
    assert newest.writer is not None
    assert [commit.step for commit in log.commits()] == [10, 20, 25, 35]


def test_old_records_are_swept_as_new_ones_are(store: LocalStore) -> None:
    log = CommitLog(store, RUN)
    save(store, 35, by=attempt(3), base_step=25)
    sweep(store, log, [commit for commit in log.all_commits() if commit.step < 35])
    assert [commit.step for commit in log.all_commits()] == [35]
    assert {entry.key.split("/")[0] for entry in store.list("") if "0000000035" not in entry.key} == {"quarantine"}
