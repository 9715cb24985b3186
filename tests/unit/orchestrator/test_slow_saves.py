"""Abnormally slow saves and their likely cause, by the clock of the test."""

from __future__ import annotations

import pytest

from orchestrator.slow_saves import SlowSave, SlowSaves
from storage.keys import Attempt
from storage.manifest import AttemptRecord, Receipt, ShardRecord

ATTEMPT = AttemptRecord.of(Attempt(number=1, nonce="00000000"))


def receipt(rank: int, *, stall_s: float = 0.1, encode_s: float = 1.0, upload_s: float = 2.0) -> Receipt:
    return Receipt(
        run_id="r",
        step=1,
        attempt=ATTEMPT,
        world_size=2,
        shard=ShardRecord(rank=rank, key="k", size=1, digest="0" * 32, index_bytes=1, index_digest="0" * 32),
        tensors={},
        shared_state=None,
        stall_s=stall_s,
        encode_s=encode_s,
        upload_s=upload_s,
    )


def after_usual_saves() -> SlowSaves:
    """Four saves of four seconds each."""
    saves = SlowSaves(floor_s=5.0)
    for step in range(1, 5):
        saves.begin(step, step * 100.0)
        assert saves.committed(step, [receipt(0), receipt(1)], 0.5, step * 100.0 + 4.0) is None
    return saves


@pytest.mark.parametrize(
    ("slow", "commit_s", "cause"),
    [
        (receipt(1, upload_s=18.0), 0.5, "uploading: the store or the network is slow (rank 1: 18.0 s)"),
        (receipt(1, encode_s=18.0), 0.5, "encoding: the CPUs of the node are busy (rank 1: 18.0 s)"),
        (receipt(1, stall_s=18.0), 0.5, "copying into shared memory: memory bandwidth or the device is busy"),
        (receipt(1), 17.0, "the Commit: small writes and listings of the store are slow"),
    ],
)
def test_a_slow_save_is_named_with_the_part_that_grew(slow: Receipt, commit_s: float, cause: str) -> None:
    saves = after_usual_saves()
    saves.begin(9, 900.0)
    word = saves.committed(9, [receipt(0), slow], commit_s, 920.0)
    assert word is not None
    assert (word.step, word.seconds, word.usual_s) == (9, 20.0, 4.0)
    assert word.cause.startswith(cause)


def test_a_save_under_way_is_called_late_once_with_the_ranks_that_are_missing() -> None:
    saves = after_usual_saves()
    saves.begin(9, 900.0)
    assert saves.overdue({9: (1,)}, 911.0) == []
    cause = "still encoding or uploading: rank 1"
    assert saves.overdue({9: (1,)}, 913.0) == [SlowSave(step=9, seconds=13.0, usual_s=4.0, cause=cause)]
    assert saves.overdue({9: (1,)}, 950.0) == []
    assert saves.committed(9, [receipt(0)], 0.5, 960.0) is None, "it was said while it was under way"


def test_nothing_is_slow_before_there_is_something_to_compare_nor_when_its_cause_was_said() -> None:
    saves = SlowSaves()
    saves.begin(1, 0.0)
    assert saves.overdue({1: (0,)}, 1000.0) == []
    saves = after_usual_saves()
    saves.begin(9, 900.0)
    saves.explain(9)
    assert saves.overdue({9: (0,)}, 1000.0) == []


def test_saves_that_are_over_in_no_time_are_never_slow() -> None:
    saves = SlowSaves(floor_s=10.0)
    for step in range(1, 6):
        saves.begin(step, step * 100.0)
        saves.committed(step, [receipt(0)], 0.1, step * 100.0 + 0.5)
    saves.begin(9, 900.0)
    assert saves.committed(9, [receipt(0, upload_s=9.0)], 0.1, 909.5) is None


def test_saves_that_an_outage_holds_up_are_not_called_slow_and_change_nothing_about_what_is_usual() -> None:
    saves = after_usual_saves()
    saves.begin(9, 900.0)
    saves.begin(10, 910.0)
    saves.explain(9)
    assert saves.overdue({9: (1,), 10: (0,)}, 990.0) == []
    for step in (9, 10):
        assert saves.committed(step, [receipt(0), receipt(1)], 60.0, 1000.0) is None
    saves.begin(11, 1100.0)
    word = saves.committed(11, [receipt(0), receipt(1)], 16.0, 1120.0)
    assert word is not None
    assert word.usual_s == 4.0
