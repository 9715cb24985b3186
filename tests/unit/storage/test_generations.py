"""The ledger alone: no buffers, no threads but the test's."""

from __future__ import annotations

import pytest

from storage.errors import StorageError
from storage.generation import Generation
from storage.generations import Generations
from storage.keeper_protocol import SealedSnapshot, TransportAddress
from storage.keys import Attempt
from storage.transport import ReplicaRef
from tests.fakes.memory_bench import FIRST, SECOND

PEER = TransportAddress(node_id="b", host="127.0.0.1", port=1)


class Ledger(Generations):
    """Remembers what was dropped."""

    def __init__(self) -> None:
        self.dropped: list[tuple[int, int, int]] = []
        super().__init__(lambda g: self.dropped.append((g.attempt.number, g.step, g.rank)))

    def seal(
        self, step: int, rank: int = 0, attempt: Attempt = FIRST, peer: TransportAddress | None = PEER
    ) -> Generation:
        """A generation sealed and whole."""
        self.add_own(
            SealedSnapshot(
                lease_id=f"{attempt.label}-{step}-{rank}",
                run_id="run",
                attempt=attempt,
                step=step,
                rank=rank,
                world_size=2,
                num_bytes=10,
                header_digest="",
                stall_s=0.0,
                keep=True,
                ship=False,
                peer=peer,
            ),
            "path",
        )
        generation = self.next_to_index()
        assert generation is not None
        self.set_whole(generation, ref(step, rank, attempt))
        return generation


def ref(step: int, rank: int = 0, attempt: Attempt = FIRST, safe_step: int = -1) -> ReplicaRef:
    return ReplicaRef(
        run_id="run",
        attempt=attempt,
        step=step,
        rank=rank,
        world_size=2,
        num_bytes=10,
        digest="0" * 32,
        safe_step=safe_step,
    )


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def sent(ledger: Ledger, now_s: float = 0.0) -> Generation:
    generation = ledger.next_to_send(lambda: now_s)
    assert generation is not None
    return generation


def test_generations_of_one_rank_are_sent_one_by_one_in_order_and_ranks_do_not_wait_for_each_other(
    ledger: Ledger,
) -> None:
    for step, rank in ((1, 0), (2, 0), (2, 1)):
        ledger.seal(step, rank)
    first, other = sent(ledger), sent(ledger)
    assert [(g.step, g.rank) for g in (first, other)] == [(1, 0), (2, 1)]
    ledger.set_replicated(first)
    assert sent(ledger).step == 2


def test_one_that_failed_is_tried_again_when_due_and_given_up_for_a_newer_one(ledger: Ledger) -> None:
    old = ledger.seal(1)
    assert sent(ledger, 0.0) is old
    ledger.set_failed(old, "no", retry_at_s=5.0)
    assert not ledger.is_decided(FIRST, 0, 1)
    assert sent(ledger, 5.0) is old
    ledger.set_failed(old, "no again", retry_at_s=9.0)
    new = ledger.seal(2)
    assert ledger.is_decided(FIRST, 0, 1)
    assert sent(ledger, 5.0) is new
    assert ledger.error() == "no again"
    ledger.set_replicated(new)
    assert ledger.error() is None
    assert ledger.progress(FIRST, 0).replicated_step == 2


def test_the_newest_is_tried_again_for_ever_though_nobody_waits_for_it(ledger: Ledger) -> None:
    only = ledger.seal(1)
    for number in range(5):
        assert sent(ledger, float(number)) is only
        ledger.set_failed(only, "no", retry_at_s=number + 1.0, is_stalled=number >= 2)
        assert ledger.is_decided(FIRST, 0, 1) is (number >= 2)
    ledger.retry_now(PEER)
    assert not ledger.is_decided(FIRST, 0, 1)
    assert sent(ledger, 0.0) is only


def test_one_that_fails_after_a_newer_was_sealed_is_not_tried_again(ledger: Ledger) -> None:
    old = ledger.seal(1)
    assert sent(ledger) is old
    new = ledger.seal(2)
    ledger.set_failed(old, "no", retry_at_s=0.0)
    assert sent(ledger) is new


def test_nothing_of_an_attempt_that_is_over_is_sent_but_it_is_indexed_and_kept(ledger: Ledger) -> None:
    ledger.seal(1)
    ledger.fence(2)
    new = ledger.seal(1, attempt=SECOND)
    assert sent(ledger) is new
    assert ledger.is_decided(FIRST, 0, 1)
    assert [(g.attempt, g.step) for g in ledger.whole()] == [(FIRST, 1), (SECOND, 1)]


def test_where_no_rank_of_the_new_attempt_is_nothing_of_the_old_one_is_tried_or_told(ledger: Ledger) -> None:
    only = ledger.seal(1)
    assert sent(ledger) is only
    ledger.set_failed(only, "refused: that attempt is over", retry_at_s=1.0, is_stalled=True)
    assert ledger.error() == "refused: that attempt is over"
    ledger.fence(2)
    assert ledger.error() is None
    assert not ledger._sendable(9.0)
    assert ledger.whole() == (only,)


def test_what_is_dropped_while_it_is_being_sent_comes_to_nothing(ledger: Ledger) -> None:
    old = ledger.seal(1)
    assert sent(ledger) is old
    ledger.seal(2)
    ledger.note_lease(FIRST, 3, 2)
    ledger.set_replicated(old)
    assert ledger.dropped == [(1, 1, 0)]
    assert [g.step for g in ledger.whole()] == [2]


def test_the_word_of_a_late_rank_about_an_older_safe_step_changes_nothing(ledger: Ledger) -> None:
    for step in (1, 2, 3):
        ledger.seal(step)
    ledger.note_lease(FIRST, 4, 3)
    ledger.note_lease(FIRST, 4, 1)
    assert [g.step for g in ledger.whole()] == [3]
    ledger.seal(4, attempt=SECOND)
    ledger.note_lease(SECOND, 5, -1)
    assert [g.step for g in ledger.whole()] == [3, 4]


def test_a_late_replica_of_an_attempt_that_is_over_takes_nothing_from_the_one_that_went_on_from_it(
    ledger: Ledger,
) -> None:
    ledger.seal(3)
    ledger.note_lease(SECOND, 4, -1)  # it went on from step 3: a node was lost, and step 5 with it
    with pytest.raises(StorageError, match="attempt 2 has begun"):
        ledger.begin_replica(ref(6, rank=1, safe_step=5))
    assert ledger.find(FIRST, 3, 0) is not None
    assert ledger.dropped == []


def test_a_fourth_replica_of_a_rank_takes_the_place_of_one_that_may_go(ledger: Ledger) -> None:
    for step in (1, 2, 3):
        assert ledger.begin_replica(ref(step))
        assert ledger.end_replica(ref(step), f"lease-{step}", "path")
    assert ledger.begin_replica(ref(4, rank=1))
    assert ledger.begin_replica(ref(4, safe_step=2))
    assert ledger.dropped == [(1, 1, 0)]


def test_replicas_that_never_become_safe_make_way_for_newer_ones_but_the_oldest_stays(ledger: Ledger) -> None:
    for step in (2, 3, 5, 6, 7):
        assert ledger.begin_replica(ref(step))
        assert ledger.end_replica(ref(step), f"lease-{step}", "path")
    assert [g.step for g in ledger.whole()] == [2, 6, 7]
    with pytest.raises(StorageError, match=r"those of steps \[2, 6, 7\] are here"):
        ledger.begin_replica(ref(4))
    assert ledger.begin_replica(ref(8))
    with pytest.raises(StorageError, match=r"those of steps \[2, 7, 8\] are here"):
        ledger.begin_replica(ref(9))  # two that are here and one that is coming


def test_a_replica_that_is_here_is_not_asked_for_again_and_two_may_come_at_once(ledger: Ledger) -> None:
    assert ledger.begin_replica(ref(1))
    assert ledger.begin_replica(ref(1))
    with pytest.raises(StorageError, match="coming in already"):
        ledger.begin_replica(ref(1))
    assert ledger.end_replica(ref(1), "lease-1", "path")
    assert not ledger.end_replica(ref(1), "lease-2", "path")
    assert not ledger.begin_replica(ref(1))
    assert [g.lease_id for g in ledger.whole()] == ["lease-1"]


def test_a_replica_that_comes_too_late_is_not_kept(ledger: Ledger) -> None:
    assert ledger.begin_replica(ref(1))
    assert ledger.begin_replica(ref(2))
    ledger.note_lease(FIRST, 3, 2)
    assert not ledger.end_replica(ref(1), "lease-1", "path")
    ledger.fence(2)
    assert not ledger.end_replica(ref(2), "lease-2", "path")
    with pytest.raises(StorageError, match="that attempt is over"):
        ledger.begin_replica(ref(3))


def test_one_rank_holds_its_own_and_a_replica_of_the_same_step_apart(ledger: Ledger) -> None:
    own = ledger.seal(1)
    assert ledger.begin_replica(ref(1))
    assert ledger.end_replica(ref(1), "lease-1", "path")
    assert ledger.find(FIRST, 1, 0) is own
    assert len(ledger.whole(FIRST, 1)) == 2


def test_giving_way_keeps_what_the_new_attempt_can_have_begun_from(ledger: Ledger) -> None:
    for step in (4, 5, 6):
        for rank in (0, 1):
            ledger.seal(step, rank)
    assert ledger.begin_replica(ref(5, rank=3))
    assert ledger.end_replica(ref(5, rank=3), "lease-1", "path")
    ledger.note_lease(SECOND, 6, -1)
    assert ledger.give_way(SECOND)
    assert sorted((g.step, g.rank) for g in ledger.whole()) == [(5, 0), (5, 1), (5, 3)]
    assert not ledger.give_way(SECOND)


def test_closing_ends_every_wait(ledger: Ledger) -> None:
    ledger.close()
    assert ledger.next_to_index() is None
    assert ledger.next_to_send(lambda: 0.0) is None
    assert ledger.is_decided(FIRST, 0, 1)
    assert ledger.is_indexed()


def test_who_watches_is_told_until_it_has_enough(ledger: Ledger) -> None:
    told: list[int] = []
    end = ledger.watch(lambda: told.append(1))
    ledger.seal(1)
    num = len(told)
    assert num > 0
    end()
    ledger.seal(2)
    assert len(told) == num
