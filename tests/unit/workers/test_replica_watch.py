"""What a rank learns of its replicas. The Keeper is a script of answers, one for each question."""

from __future__ import annotations

import threading
from typing import Any

from storage.keeper_protocol import LeaseRequest, MemoryProgress
from storage.keys import Attempt
from workers.replica_watch import ReplicaWatch

FIRST = Attempt(number=1, nonce="00000000")
WAIT_S = 10.0


class ScriptedKeeper:
    """Answers (sealed step, replicated step) in turn, the last for ever."""

    def __init__(self, *answers: tuple[int, int]) -> None:
        self._answers = list(answers)
        self.asked: list[int] = []
        self.is_asked_out = threading.Event()

    def wait_replicated(self, attempt: Attempt, rank: int, step: int, timeout_s: float) -> MemoryProgress:
        del timeout_s
        self.asked.append(step)
        sealed, replicated = self._answers.pop(0)
        if not self._answers:
            self.is_asked_out.set()
            self._answers = [(sealed, replicated)]
        return MemoryProgress(attempt=attempt, rank=rank, sealed_step=sealed, replicated_step=replicated)


def watch(keeper: Any, *steps: int) -> ReplicaWatch:
    watch = ReplicaWatch(keeper, "rank 0")
    for step in steps:
        watch.add(LeaseRequest(run_id="r", attempt=FIRST, step=step, rank=0, pid=1, num_bytes=1))
    watch.start()
    assert keeper.is_asked_out.wait(WAIT_S)
    watch.close()
    watch.join(WAIT_S)
    return watch


def test_a_generation_that_its_keeper_was_never_given_has_died_with_the_keeper_before() -> None:
    keeper = ScriptedKeeper((4, 4), (-1, -1), (6, 6))
    found = watch(keeper, 4, 5, 6)
    assert keeper.asked[:3] == [4, 5, 6]
    assert [found.is_replicated(step) for step in (4, 5, 6)] == [True, False, True]
    assert [found.is_lost(step) for step in (4, 5, 6)] == [False, True, False]


def test_one_that_is_sealed_and_still_under_way_is_asked_for_again() -> None:
    keeper = ScriptedKeeper((4, -1), (4, 4))
    found = watch(keeper, 4)
    assert keeper.asked == [4, 4]
    assert (found.is_replicated(4), found.is_lost(4)) == (True, False)
