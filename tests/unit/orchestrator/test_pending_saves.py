"""The ledger of saves under way: what it forgets in an Attempt that lasts."""

from __future__ import annotations

from orchestrator.pending_saves import PendingSaves


def test_an_attempt_that_saves_all_the_time_keeps_its_newest_saves_alone() -> None:
    saves = PendingSaves()
    saves.begin(2)
    for step in range(1, 5001):
        assert saves.expect(step)
        assert not saves.expect(step), "heard of twice"
        saves.settle_committed(step)
    assert (4990 in saves.committed, 10 in saves.committed, saves.is_settled(None)) == (True, False, True)
    assert max(len(value) for value in vars(saves).values() if hasattr(value, "__len__")) <= 1024
