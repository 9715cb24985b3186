"""Whether an evaluation is to end, on a rank's own: what is asked and read when, and what is held."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import torch

from workers.yielding import Yielding


class _Work:
    """A sum of this rank alone, over at once."""

    def __init__(self) -> None:
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1


class _Bench:
    def __init__(self) -> None:
        self.works: list[weakref.ref[_Work]] = []
        self.is_order_waiting = False
        self.desk = SimpleNamespace(is_ending=False, waits_to_end=lambda _: self.is_order_waiting)
        self.yielding = Yielding(
            torch.device("cpu"),
            start_sum=self._start,  # type: ignore[arg-type]
            desk=lambda: self.desk,  # type: ignore[arg-type,return-value]
        )

    def _start(self, word: torch.Tensor) -> _Work:
        del word
        work = _Work()
        self.works.append(weakref.ref(work))
        return work

    @property
    def num_held(self) -> int:
        return sum(work() is not None for work in self.works)


def test_the_first_word_of_an_evaluation_is_waited_for_and_each_other_read_a_leaf_later() -> None:
    bench = _Bench()
    assert not bench.yielding.must_stop(4)
    bench.is_order_waiting = True
    assert not bench.yielding.must_stop(4), "its word is under way"
    assert bench.yielding.must_stop(4)
    assert bench.yielding.must_stop(4), "once said it stays so"
    assert len(bench.works) == 2, "and nothing more is summed"


def test_what_all_ranks_know_by_a_step_vector_is_not_asked_again() -> None:
    bench = _Bench()
    bench.desk.is_ending = True
    assert bench.yielding.must_stop(4)
    assert bench.works == []


def test_a_sum_that_nobody_read_is_let_go_at_the_end() -> None:
    """A Work of gloo keeps the connections of its group: while one lives, ranks that wait for this one wait on."""
    bench = _Bench()
    assert not bench.yielding.must_stop(4)
    assert not bench.yielding.must_stop(4)
    assert bench.num_held == 1
    bench.yielding.close()
    assert bench.num_held == 0
