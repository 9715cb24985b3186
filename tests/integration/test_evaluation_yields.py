"""An Order to leave comes in the middle of an evaluation. Real: processes, gloo, FSDP2, Keepers, the courier."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.fakes.rank_processes import Trio
from tests.fakes.token_datasets import write_numbered_rows
from tests.fakes.worker_settings import make_settings
from workers.config import EvalConfig
from workers.contract import Order, OrderKind, OutcomeKind
from workers.session import Session
from workers.stream import Leaf

LEAVES = 24  # of micro_batch 2
AT_LEAF = 3
EVERY = 2
CUT_STEP = 2 * EVERY
WAIT_S = 60.0


class _Counted:
    """The built-in loss; counts evaluated leaves by step, and keeps the Order from rank 0 until one of them."""

    def __init__(self, session: Session) -> None:
        self._session, self._loss = session, session.loss
        self.counts: dict[int, int] = {}
        self._may_know = False
        courier = session._courier
        if courier is not None:
            self._newest = courier.newest_order
            courier.newest_order = self._known  # type: ignore[method-assign]

    def __call__(self, leaf: Leaf) -> torch.Tensor:
        if not torch.is_grad_enabled():
            step = self._session.finished_step + 1
            self.counts[step] = self.counts.get(step, 0) + 1
            if step == CUT_STEP and self.counts[step] == AT_LEAF and self._session.rank == 0:
                self._may_know = True
                self._wait_for_order()
        return self._loss(leaf)

    def _known(self) -> Order | None:
        return self._newest() if self._may_know else None

    def _wait_for_order(self) -> None:
        until = threading.Event()
        for _ in range(int(WAIT_S / 0.01)):
            if self._newest() is not None:
                return
            until.wait(0.01)
        raise TimeoutError(f"no Order came within {WAIT_S:g} s")


def loop(session: Session, directory: str, own: bool) -> None:
    counted = _Counted(session)
    session.loss = counted  # type: ignore[method-assign]
    for step in session.steps():
        for leaf in step.leaves():
            step.backward(leaf, session.loss(leaf))
        step.apply()
        if own:
            _evaluate(session, step.number, counted)
        else:
            session.evaluate_if_due(step)
        session.step_end(step)
    Path(directory, str(session.rank)).write_text(repr(counted.counts))


def _evaluate(session: Session, step: int, counted: _Counted) -> None:
    """An evaluation of the loop's own: of one leaf, again and again."""
    if step % EVERY:
        return
    ids = torch.zeros(1, 16, dtype=torch.int64)
    leaf = Leaf(index=0, is_surplus=False, input_ids=ids, labels=ids, sample_ids=torch.zeros(1).numpy())
    for _ in range(LEAVES // session.world_size):
        if session.should_yield():
            return
        with torch.no_grad():
            counted(leaf)


@pytest.mark.parametrize(("world_size", "own"), [(2, False), (3, False), (2, True)])
def test_all_ranks_stop_at_the_same_leaf_and_leave_two_steps_later(
    trio: Trio, tmp_path: Path, world_size: int, own: bool
) -> None:
    url = str(tmp_path / "data")
    write_numbered_rows(url, 200, sequence_length=16, validation_rows=2 * LEAVES)
    settings = make_settings(url, total_steps=20, eval_every=EVERY)
    settings = replace(settings, eval=EvalConfig(every_steps=EVERY, num_leaves=LEAVES))
    trio.make(settings, tmp_path / "store", partial(loop, directory=str(tmp_path), own=own))
    left = trio.run(world_size, order_after=1, kind=OrderKind.LEAVE)
    assert [one.outcome.cause for one in left] == [None] * world_size
    assert [(one.outcome.kind, one.outcome.last_step) for one in left] == [(OutcomeKind.LEFT, 6)] * world_size
    # The word of leaf 3 is read after leaf 4, which is computed meanwhile; step 6 begins none.
    expected = repr({EVERY: LEAVES // world_size, CUT_STEP: AT_LEAF + 1})
    assert [Path(tmp_path, str(rank)).read_text() for rank in range(world_size)] == [expected] * world_size
    assert [one.step for one in left[0].evals] == ([] if own else [EVERY])
    saved = next(receipt for receipt in left[0].receipts if receipt.step == 6)
    assert saved.shared_state is not None
    assert f"'best_step': {None if own else EVERY}" in str(saved.shared_state)
    trio.make(replace(settings, eval=EvalConfig(every_steps=None), total_steps=6), tmp_path / "plain")
    plain = trio.run(world_size)
    assert [one.loss for one in left[0].reports] == [one.loss for one in plain[0].reports]
