"""Generations in memory, taken while a World trains. Real: processes, gloo, FSDP2, Keepers and their transport."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from storage.keys import Attempt
from storage.memory_plan import ChosenGeneration, build_plan, choose_generation
from storage.sources import RestorePlan
from tests.fakes.rank_processes import Ended, Trio
from tests.fakes.state_loops import train_with_own_state
from tests.fakes.token_datasets import write_numbered_rows
from tests.fakes.worker_settings import make_settings
from workers.config import ModelConfig, OptimConfig
from workers.contract import OrderKind, OutcomeKind

STEPS = 12


@pytest.fixture(scope="module")
def data_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("data"))
    write_numbered_rows(url, 200, sequence_length=16, validation_rows=12)
    return url


def held(trio: Trio, rank: int) -> list[tuple[int, int, bool]]:
    """Step, rank and kind of what the Keeper of process ``rank`` holds."""
    report = trio.processes[rank].call("memory_report")
    return sorted((facts.step, facts.rank, facts.is_replica) for facts in report.generations)


def outcomes(ended: list[Ended]) -> list[OutcomeKind]:
    return [one.outcome.kind for one in ended]


def test_every_step_is_kept_on_its_node_and_at_a_peer_and_older_ones_go(
    trio: Trio, data_url: str, tmp_path: Path
) -> None:
    trio.make(make_settings(data_url, total_steps=STEPS, memory_every=1), tmp_path)
    plain = trio.run(3)
    ended = trio.run(3, in_memory=True)
    assert outcomes(ended) == [OutcomeKind.FINISHED] * 3
    assert ended[0].outcome.weights_digest == plain[0].outcome.weights_digest
    assert [r.loss for r in ended[0].reports] == [r.loss for r in plain[0].reports]
    assert [r.memory_step for r in ended[0].reports] == list(range(1, STEPS + 1))
    safe = [r.safe_step for r in ended[0].reports]
    assert safe == sorted(safe)
    assert 0 < safe[-1] < STEPS
    for rank in range(3):
        owners = ((rank, False), ((rank - 1) % 3, True))
        assert held(trio, rank)[-2:] == sorted((STEPS, owner, is_replica) for owner, is_replica in owners)
        assert min(step for step, _, _ in held(trio, rank)) >= safe[-1]


def test_a_world_that_parts_leaves_its_last_step_in_memory_alone(trio: Trio, data_url: str, tmp_path: Path) -> None:
    trio.make(make_settings(data_url, total_steps=200, memory_every=50), tmp_path)
    ended = trio.run(3, in_memory=True, order_after=2, kind=OrderKind.PART)
    assert outcomes(ended) == [OutcomeKind.LEFT] * 3
    step = ended[0].outcome.last_step
    for rank in range(3):
        assert (step, rank, False) in held(trio, rank)
        assert (step, (rank - 1) % 3, True) in held(trio, rank)
    assert all(not one.receipts for one in ended)


def test_a_leave_and_the_last_step_are_stored_and_kept_by_one_copy(trio: Trio, data_url: str, tmp_path: Path) -> None:
    trio.make(make_settings(data_url, total_steps=200, memory_every=50), tmp_path)
    left = trio.run(2, in_memory=True, order_after=2, kind=OrderKind.LEAVE)
    assert outcomes(left) == [OutcomeKind.LEFT] * 2
    step = left[0].outcome.last_step
    assert [[receipt.step for receipt in one.receipts] for one in left] == [[step]] * 2
    assert (step, 0, False) in held(trio, 0)
    trio.make(make_settings(data_url, total_steps=5, memory_every=1, every_steps=2), tmp_path / "short")
    ended = trio.run(2, in_memory=True)
    assert [[receipt.step for receipt in one.receipts] for one in ended] == [[2, 4, 5]] * 2
    assert [order.step for order in ended[0].bound] == [2, 4, 5]
    assert not ended[0].skipped
    assert {(5, 0, False), (5, 1, True)} <= set(held(trio, 0))


def logged(folder: Path, rank: int) -> list[Any]:
    """What `train_with_own_state` has written, as it was restored and after each step."""
    path = folder / f"rank-{rank}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [eval(line, {"__builtins__": {}}) for line in lines]


def _but_for_the_attempt(shared: Any) -> Any:
    """The ledger says which Attempt consumed what."""
    return None if shared is None else shared | {"progress": shared["progress"] | {"ledger": ""}}


def test_what_is_stored_with_the_memory_tier_on_is_what_is_stored_without(
    trio: Trio, data_url: str, tmp_path: Path
) -> None:
    settings = make_settings(data_url, total_steps=4, every_steps=3, memory_every=1)
    trio.make(settings, tmp_path / "plain")
    plain = trio.run(2)
    trio.make(settings, tmp_path / "memory")
    kept = trio.run(2, in_memory=True)
    for before, after in zip(plain, kept, strict=True):
        assert [receipt.step for receipt in after.receipts] == [3, 4]
        for one, other in zip(before.receipts, after.receipts, strict=True):
            assert _but_for_the_attempt(one.shared_state) == _but_for_the_attempt(other.shared_state)
            assert one.tensors == other.tensors
            assert one.shard.size == other.shard.size  # compressed: other bytes would have another


def test_abandon_lets_go_of_the_model_and_what_is_in_memory_stays(trio: Trio, data_url: str, tmp_path: Path) -> None:
    trio.make(make_settings(data_url, total_steps=100_000, memory_every=1), tmp_path)
    attempt = trio.start(2, in_memory=True)
    while trio.processes[0].call("heartbeat").step < 4:
        pass
    for process in trio.processes[:2]:
        process.send("abandon", attempt)
    reports = [process.receive() for process in trio.processes[:2]]
    assert all(report.is_clean for report in reports)
    steps = [{step for step, owner, is_replica in held(trio, rank) if not is_replica} for rank in (0, 1)]
    assert steps[0] & steps[1], "no step is in memory on both ranks"
    again = trio.run(2, in_memory=True, order_after=1, kind=OrderKind.PART)
    assert outcomes(again) == [OutcomeKind.LEFT] * 2


def test_a_killed_rank_leaves_its_newest_steps_with_its_peer(trio: Trio, data_url: str, tmp_path: Path) -> None:
    trio.make(make_settings(data_url, total_steps=100_000, memory_every=1), tmp_path)
    attempt = trio.start(3, in_memory=True)
    while trio.processes[2].call("heartbeat").step < 6:
        pass
    os.kill(trio.processes[2].pid, signal.SIGKILL)
    ended = trio.ended(attempt, (0, 1))
    last = max(one.outcome.last_step for one in ended)
    whole: set[int] | None = None
    for owner in range(3):
        found = {step for rank in (0, 1) for step, of, _ in held(trio, rank) if of == owner}
        whole = found if whole is None else whole & found
    assert whole, "no step is whole in memory"
    assert max(whole) >= last - 1
    trio.replace(2)


def memory_plan(trio: Trio, attempt: Attempt, size: int, url: str) -> RestorePlan:
    """By which the first ``size`` processes go on from the newest step of ``attempt`` that the Keepers hold."""
    chosen = choose_generation([process.call("memory_report") for process in trio.processes], lineage={attempt: 0})
    assert isinstance(chosen, ChosenGeneration), chosen
    receipts = {
        f"n{rank}": process.call("generation_receipts", attempt, chosen.key.step)
        for rank, process in enumerate(trio.processes)
    }
    return build_plan(
        chosen,
        receipts,
        attempt=trio.new_attempt(),
        member_nodes=[f"n{rank}" for rank in range(size)],
        root_url=url,
        time_utc="2026-01-01T00:00:00Z",
        metadata={},
        key=bytes(range(32)),
    )


@pytest.mark.parametrize("parallelism", ["fsdp", "ddp"])
def test_what_peers_hold_is_the_whole_state_at_any_world_size(
    trio: Trio, data_url: str, tmp_path: Path, parallelism: str
) -> None:
    """Scaler, each rank's own trackers and random numbers, a sharded average, the ledger; under DDP the replicas are
    compared when the plan is made."""
    made = make_settings(data_url, total_steps=30, memory_every=1)
    model = ModelConfig.model_validate({"parallelism": parallelism})
    settings = replace(made, model=model, optim=OptimConfig(loss_scaling=True), loop_config={"folder": str(tmp_path)})
    trio.make(settings, tmp_path / "store", train_with_own_state)
    left = trio.run(2, in_memory=True, order_after=2, kind=OrderKind.PART)
    assert outcomes(left) == [OutcomeKind.LEFT] * 2
    step, attempt = left[0].outcome.last_step, left[0].outcome.attempt
    saved = [logged(tmp_path, rank)[-1] for rank in range(2)]
    assert [line[0] for line in saved] == [step] * 2
    for size in (2, 1, 3):
        plan = memory_plan(trio, attempt, size, str(tmp_path / "store"))
        assert (plan.step, plan.memory is not None) == (step, True)
        num_before = [len(logged(tmp_path, rank)) for rank in range(size)]
        ended = trio.run(size, restore=plan)
        assert outcomes(ended) == [OutcomeKind.FINISHED] * size, ended[0].outcome.cause
        lines = [logged(tmp_path, rank)[before] for rank, before in enumerate(num_before)]
        for rank in range(min(size, 2)):
            assert lines[rank][:6] == saved[rank][:6]
            assert lines[rank][6] == pytest.approx(saved[rank][6], rel=1e-6)
        assert [line[1] for line in lines[2:]] == [102] * (size - 2)  # as it was made
        assert ended[0].reports[0].step == step + 1
        assert ended[0].reports[0].loss_scale == left[0].reports[-1].loss_scale
