"""What a training thread says of where it failed, and how it is let go. No group is formed, nothing is trained."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from storage.errors import CorruptCheckpoint
from storage.keys import Attempt, StepKey
from storage.sources import RestorePlan
from tests.fakes.rank_processes import make_spec
from workers.chaos_seam import ChaosError
from workers.contract import CauseKind, Phase
from workers.groups import Groups
from workers.heartbeat import Pulse
from workers.training_thread import TrainingThread

SAVED = StepKey(step=30, attempt=Attempt(number=1, nonce="0000000a"))
SECOND = Attempt(number=2, nonce="0000000b")
PLAN = RestorePlan(
    attempt=SECOND, source=SAVED, root_url="/run", manifest_key="m", manifest_bytes=1, manifest_digest="d", shards=()
)


def thread_in(
    phase: Phase, restore: RestorePlan | None, train_loop: Callable[[Any], None] = lambda _: None
) -> TrainingThread:
    pulse = Pulse()
    pulse.beat(phase)
    return TrainingThread(
        cast(Any, SimpleNamespace(model=SimpleNamespace(shard_size=None))),
        make_spec(SECOND, 1, 2, 1, restore=restore),
        cast(Any, SimpleNamespace(device=torch.device("cpu"), stager=SimpleNamespace(cancel=lambda: None))),
        worker_id="w1",
        train_loop=train_loop,
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


def raise_bare(*_: object) -> None:
    raise ValueError("the name is taken already")


def raise_chaos(*_: object) -> None:
    raise ChaosError


@pytest.mark.parametrize(
    ("form", "kind"),
    [(raise_bare, CauseKind.COLLECTIVE), (raise_chaos, CauseKind.USER), (lambda *_: None, CauseKind.USER)],
    ids=["while-forming", "as-the-loops-while-forming", "in-the-loop"],
)
def test_what_is_raised_before_the_groups_are_formed_is_not_the_loops(
    monkeypatch: pytest.MonkeyPatch, form: Callable[..., None], kind: CauseKind
) -> None:
    monkeypatch.setattr(Groups, "form", form)
    thread = thread_in(Phase.IDLE, PLAN, train_loop=raise_bare)
    with pytest.raises((ValueError, ChaosError)) as raised:
        thread._train(cast(Any, None))
    cause = thread._cause(raised.value, 0)
    assert (cause.kind, cause.is_forming) == (kind, form in (raise_bare, raise_chaos))


class Cycle(nn.Module):
    """Only a collection of garbage frees it."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["itself"] = self


@pytest.mark.parametrize("is_held_by_a_cycle", [False, True], ids=["gone-already", "held-by-a-cycle"])
def test_letting_go_collects_garbage_only_where_the_model_is_still_there(
    monkeypatch: pytest.MonkeyPatch, is_held_by_a_cycle: bool
) -> None:
    thread = thread_in(Phase.IDLE, None)
    model = Cycle() if is_held_by_a_cycle else nn.Module()
    thread._model = weakref.ref(model)
    calls: list[None] = []
    collect = gc.collect

    def counted() -> int:
        calls.append(None)
        return collect()

    monkeypatch.setattr("workers.training_thread.gc.collect", counted)
    del model
    assert thread.abandon(10.0)
    assert len(calls) == is_held_by_a_cycle


def test_a_model_that_somebody_holds_is_not_let_go() -> None:
    thread, model = thread_in(Phase.IDLE, None), nn.Module()
    thread._model = weakref.ref(model)
    assert not thread.abandon(10.0)
