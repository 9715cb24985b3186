"""Generations in memory, taken while a World trains. Real: processes, gloo, FSDP2, Keepers and their transport."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.rank_processes import Ended, Trio
from tests.fakes.token_datasets import write_numbered_rows
from tests.fakes.worker_settings import make_settings
from workers.contract import OrderKind, OutcomeKind

STEPS = 12


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
