"""Workers under `model.parallelism: ddp`: resumed at other sizes and by FSDP2, freed between Attempts, and compared.

Real: processes, gloo, Keepers, the memory Tier, store, Manifest, restore. No Ray.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from storage.merge import merge_receipts
from storage.replicas import ReplicasDisagree
from tests.fakes.rank_processes import Ended, Trio
from tests.fakes.token_datasets import write_numbered_rows
from tests.fakes.worker_settings import make_settings
from tests.integration.test_worker_resume import plan_for
from workers.config import ModelConfig
from workers.contract import OutcomeKind
from workers.session import Session
from workers.settings import WorkerSettings

STEPS = 6
FLIPPED_AT = 3


@pytest.fixture(scope="module")
def data_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("data"))
    write_numbered_rows(url, 200, sequence_length=16, validation_rows=12)
    return url


def settings_of(data_url: str, model: dict[str, Any] | None = None, **more: Any) -> WorkerSettings:
    """Of a loop that makes its own model: transformers, which takes seconds to load, is not needed."""
    chosen = ModelConfig.model_validate({"parallelism": "ddp"} if model is None else model)
    return replace(make_settings(data_url, **more), model=chosen)


def finished(ended: Sequence[Ended]) -> bool:
    return all(one.outcome.kind is OutcomeKind.FINISHED for one in ended)


class Bigrams(nn.Module):
    """A model of the user's own that does more than its forward, and uses one half for even leaves only."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 16)
        self.even = nn.Linear(16, 16)
        self.odd = nn.Linear(16, 16)
        self.head = nn.Linear(16, 257)

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.embedding(ids)
        return out

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.encode(ids)
        logits: torch.Tensor = self.head(self.odd(self.even(x).relu()).relu())
        return logits


def whole_loop(session: Session) -> None:
    """As short as a loop can be."""
    state = session.build(make_model=Bigrams)
    for step in session.steps():
        for leaf in step.leaves():
            logits = state.model(leaf.input_ids)
            step.backward(leaf, functional.cross_entropy(logits.flatten(0, 1), leaf.labels.flatten()))
        step.apply()
        session.step_end(step)


def own_loop(session: Session) -> None:
    """With a model that is never called as a whole, and each half of it by some leaves only. Rank 1 may have a bad
    memory."""
    state = session.build(make_model=Bigrams)
    model = state.model
    assert isinstance(model, Bigrams)
    for step in session.steps():
        for leaf in step.leaves():
            middle = model.even if leaf.index % 2 == 0 else model.odd
            logits = model.head(middle(model.encode(leaf.input_ids)).relu())
            step.backward(leaf, functional.cross_entropy(logits.flatten(0, 1), leaf.labels.flatten()))
        step.apply()
        if session.rank == 1 and step.number == FLIPPED_AT and session.loop_config.get("flips"):
            with torch.no_grad():
                model.odd.bias.view(torch.int32)[2] ^= 1 << 7
        session.step_end(step)


def test_a_resumed_world_goes_on_at_any_size_and_sharded_too(trio: Trio, data_url: str, tmp_path: Path) -> None:
    settings = settings_of(data_url, every_steps=3, total_steps=STEPS)
    sharded = settings_of(data_url, {"parallelism": "fsdp"}, every_steps=3, total_steps=STEPS)
    trio.make(settings, tmp_path, whole_loop)
    unbroken = trio.run(2)
    assert finished(unbroken)
    plan = plan_for(tmp_path, unbroken, 3)
    for size, one in ((3, settings), (1, settings), (2, sharded)):
        if one is sharded:
            trio.make(sharded, tmp_path, whole_loop)
        resumed = trio.run(size, restore=plan)
        assert finished(resumed)
        assert [report.step for report in resumed[0].reports] == [4, 5, 6]
        for after, before in zip(resumed[0].reports, unbroken[0].reports[3:], strict=True):
            assert after.loss == pytest.approx(before.loss, rel=1e-4)
            assert (after.sample_chain, after.position) == (before.sample_chain, before.position)
    from_sharded = plan_for(tmp_path, resumed, STEPS)
    assert from_sharded.step == STEPS
    again = trio.run(2, restore=plan)
    trio.make(settings, tmp_path, whole_loop)
    exact = trio.run(2, restore=plan)
    assert exact[0].outcome.weights_digest == unbroken[0].outcome.weights_digest
    assert again[0].outcome.weights_digest == resumed[0].outcome.weights_digest


HOW = [{"parallelism": "ddp"}, {"parallelism": "hsdp", "shard_size": 1}]


@pytest.mark.parametrize("how", HOW, ids=["ddp", "hsdp"])
def test_abandon_lets_go_of_the_model_and_the_next_world_forms(
    trio: Trio, data_url: str, tmp_path: Path, how: dict[str, Any]
) -> None:
    trio.make(settings_of(data_url, how, total_steps=100_000, memory_every=1), tmp_path, whole_loop)
    attempt = trio.start(3, in_memory=True)
    while trio.processes[0].call("heartbeat").step < 3:
        pass
    for process in trio.processes:
        process.send("abandon", attempt)
    assert all(process.receive().is_clean for process in trio.processes)
    trio.make(settings_of(data_url, how, total_steps=3), tmp_path, whole_loop)
    assert finished(trio.run(2))


@pytest.mark.parametrize("how", HOW, ids=["ddp", "hsdp"])
def test_survivors_of_a_killed_rank_are_freed_and_go_on(
    trio: Trio, data_url: str, tmp_path: Path, how: dict[str, Any]
) -> None:
    """Well before the groups' time-out, which is longer than an outcome is waited for."""
    trio.make(settings_of(data_url, how, total_steps=100_000), tmp_path, whole_loop)
    attempt = trio.start(3, timeout_s=300.0)
    while trio.processes[2].call("heartbeat").step < 3:
        pass
    os.kill(trio.processes[2].pid, signal.SIGKILL)
    ended = trio.ended(attempt, (0, 1))
    assert all(one is not None and one.outcome.kind is OutcomeKind.FAILED for one in ended)
    trio.replace(2)
    trio.make(settings_of(data_url, how, total_steps=3), tmp_path, whole_loop)
    assert finished(trio.run(2))


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_bit_that_flips_on_one_rank_is_found_at_the_next_save(
    trio: Trio, data_url: str, tmp_path: Path, in_memory: bool
) -> None:
    settings = settings_of(data_url, every_steps=2, total_steps=4, memory_every=1)
    trio.make(replace(settings, loop_config={"flips": True}), tmp_path, own_loop)
    ended = trio.run(3, in_memory=in_memory)
    assert finished(ended)
    by_step = {step: [r for one in ended for r in one.receipts if r.step == step] for step in (2, 4)}
    merge_receipts(by_step[2], time_utc="t", metadata={}, ledger=None)
    with pytest.raises(
        ReplicasDisagree, match=r"what rank 1 holds .* first in model\.odd\.bias, in 1 tensors"
    ) as caught:
        merge_receipts(by_step[4], time_utc="t", metadata={}, ledger=None)
    assert caught.value.disagreement.ranks == (1,)


def test_a_loop_of_ones_own_trains_alike_at_every_size_and_may_turn_the_comparison_off(
    trio: Trio, data_url: str, tmp_path: Path
) -> None:
    model = {"parallelism": "ddp", "compare_replicas": False}
    settings = settings_of(data_url, model, every_steps=4, total_steps=4)
    losses = []
    for size in (1, 3):
        trio.make(replace(settings, loop_config={"flips": size == 3}), tmp_path / str(size), own_loop)
        ended = trio.run(size)
        assert finished(ended)
        losses.append([report.loss for report in ended[0].reports])
        merge_receipts([r for one in ended for r in one.receipts], time_utc="t", metadata={}, ledger=None)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
