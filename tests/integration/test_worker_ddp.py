"""Workers under `model.parallelism: ddp`: resumed at other sizes and by FSDP2, freed between Attempts, and compared.

Real: processes, gloo, Keepers, the memory Tier, store, Manifest, restore. No Ray.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

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
from workers.contract import OutcomeKind
from workers.session import Session
from workers.settings import WorkerSettings

STEPS = 6
FLIPPED_AT = 3


@pytest.fixture(scope="module")
def trio() -> Iterator[Trio]:
    trio = Trio()
    try:
        yield trio
    finally:
        trio.close()


@pytest.fixture(scope="module")
def data_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("data"))
    write_numbered_rows(url, 200, sequence_length=16, validation_rows=12)
    return url


def replicated(settings: WorkerSettings, **model: object) -> WorkerSettings:
    return replace(settings, model=settings.model.model_copy(update={"parallelism": "ddp", **model}))


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


def own_loop(session: Session) -> None:
    """A loop of the user's own, with a model that is never called as a whole. Rank 1 may have a bad memory."""
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
    sharded = make_settings(data_url, every_steps=3, eval_every=2, total_steps=STEPS)
    settings = replicated(sharded)
    trio.make(settings, tmp_path)
    unbroken = trio.run(2)
    assert finished(unbroken)
    plan = plan_for(tmp_path, unbroken, 3)
    for size, one in ((3, settings), (1, settings), (2, sharded)):
        if one is sharded:
            trio.make(sharded, tmp_path)
        resumed = trio.run(size, restore=plan)
        assert finished(resumed)
        assert [report.step for report in resumed[0].reports] == [4, 5, 6]
        for after, before in zip(resumed[0].reports, unbroken[0].reports[3:], strict=True):
            assert after.loss == pytest.approx(before.loss, rel=1e-4)
            assert (after.sample_chain, after.position) == (before.sample_chain, before.position)
    from_sharded = plan_for(tmp_path, resumed, STEPS)
    assert from_sharded.step == STEPS
    again = trio.run(2, restore=plan)
    trio.make(settings, tmp_path)
    exact = trio.run(2, restore=plan)
    assert exact[0].outcome.weights_digest == unbroken[0].outcome.weights_digest
    assert [e.loss for e in exact[0].evals] == [e.loss for e in unbroken[0].evals[1:]]
    assert again[0].outcome.weights_digest == resumed[0].outcome.weights_digest


def test_abandon_lets_go_of_the_model_and_the_next_world_forms(trio: Trio, data_url: str, tmp_path: Path) -> None:
    trio.make(replicated(make_settings(data_url, total_steps=100_000, memory_every=1)), tmp_path)
    attempt = trio.start(3, in_memory=True)
    while trio.processes[0].call("heartbeat").step < 3:
        pass
    for process in trio.processes:
        process.send("abandon", attempt)
    assert all(process.receive().is_clean for process in trio.processes)
    trio.make(replicated(make_settings(data_url, total_steps=3)), tmp_path)
    assert finished(trio.run(2))


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_bit_that_flips_on_one_rank_is_found_at_the_next_save(
    trio: Trio, data_url: str, tmp_path: Path, in_memory: bool
) -> None:
    settings = make_settings(data_url, every_steps=2, total_steps=4, memory_every=1)
    trio.make(replace(replicated(settings), loop_config={"flips": True}), tmp_path, own_loop)
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
    settings = replicated(make_settings(data_url, every_steps=4, total_steps=4), compare_replicas=False)
    losses = []
    for size in (1, 3):
        trio.make(replace(settings, loop_config={"flips": size == 3}), tmp_path / str(size), own_loop)
        ended = trio.run(size)
        assert finished(ended)
        losses.append([report.loss for report in ended[0].reports])
        merge_receipts([r for one in ended for r in one.receipts], time_utc="t", metadata={}, ledger=None)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
