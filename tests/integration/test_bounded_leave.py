"""A World that leaves in the cheaper form. Real: processes, gloo, FSDP2, Keepers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.rank_processes import Trio
from tests.fakes.token_datasets import write_numbered_rows
from tests.fakes.worker_settings import make_settings
from workers.contract import OrderKind, OutcomeKind


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("kind", [OrderKind.LEAVE, OrderKind.LEAVE_BOUNDED])
def test_a_bounded_leave_rounds_the_moments_of_its_step_alone(
    trio: Trio, tmp_path: Path, kind: OrderKind, in_memory: bool
) -> None:
    url = str(tmp_path / "data")
    write_numbered_rows(url, 200, sequence_length=16, validation_rows=12)
    trio.make(make_settings(url, total_steps=200, every_steps=2, memory_every=50), tmp_path / "store")
    left = trio.run(2, in_memory=in_memory, order_after=2, kind=kind)
    assert [one.outcome.kind for one in left] == [OutcomeKind.LEFT] * 2
    last = left[0].outcome.last_step
    for one in left:
        assert {2, last} <= {receipt.step for receipt in one.receipts}
        for receipt in one.receipts:
            rounded = {n.rpartition(".")[2] for n, layout in receipt.tensors.items() if layout.bound is not None}
            is_cheap = kind.is_bounded and receipt.step == last
            assert rounded == ({"exp_avg", "exp_avg_sq"} if is_cheap else set())
