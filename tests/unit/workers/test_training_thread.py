"""What a training thread says of where it failed. No group is formed, nothing is trained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from storage.errors import CorruptCheckpoint
from storage.keys import Attempt, StepKey
from storage.sources import RestorePlan
from tests.fakes.rank_processes import make_spec
from workers.contract import Phase
from workers.heartbeat import Pulse
from workers.training_thread import TrainingThread

SAVED = StepKey(step=30, attempt=Attempt(number=1, nonce="0000000a"))
SECOND = Attempt(number=2, nonce="0000000b")
PLAN = RestorePlan(
    attempt=SECOND, source=SAVED, root_url="/run", manifest_key="m", manifest_bytes=1, manifest_digest="d", shards=()
)


def thread_in(phase: Phase, restore: RestorePlan | None) -> TrainingThread:
    pulse = Pulse()
    pulse.beat(phase)
    return TrainingThread(
        cast(Any, SimpleNamespace(model=SimpleNamespace(shard_size=None))),
        make_spec(SECOND, 1, 2, 1, restore=restore),
        cast(Any, SimpleNamespace(device=torch.device("cpu"))),
        worker_id="w1",
        train_loop=lambda _: None,
        coordinator=cast(Any, None),
        pulse=pulse,
    )


@pytest.mark.parametrize(
    ("phase", "restore", "finished_step", "where"),
    [
        (Phase.LOADING, PLAN, 0, "rank 1, while restoring step 30"),
        (Phase.LOADING, PLAN, 30, "rank 1, while restoring step 30"),  # in its proof
        (Phase.FORMING, PLAN, 0, "rank 1, while restoring step 30"),  # in the loop, before it builds the state
        (Phase.COMPILING, PLAN, 30, "rank 1, step 31"),
        (Phase.LOADING, None, 0, "rank 1, step 1"),
    ],
)
def test_an_error_of_a_restore_names_the_step_that_is_restored(
    phase: Phase, restore: RestorePlan | None, finished_step: int, where: str
) -> None:
    error = CorruptCheckpoint(step=30, key="shards/a", reason="hash mismatch")
    cause = thread_in(phase, restore)._cause(error, finished_step)
    assert cause.where == where
    assert cause.corrupt_step == (None if restore is None else SAVED)
