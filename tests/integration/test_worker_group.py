"""Training processes without a driver. Real: processes, gloo, FSDP2, transformers, Keepers, stores. Scripted: Orders.

The same three processes serve every test, as warm workers do: each test gives them new settings and newer Attempts.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.fakes.rank_processes import Trio, make_spec
from tests.fakes.token_datasets import write_numbered_rows
from tests.fakes.worker_settings import TINY_LLAMA, make_settings
from workers.contract import CauseKind, OrderKind, OutcomeKind, Phase
from workers.errors import AttemptRefused
from workers.session import Session

STEPS = 6
NUM_ROWS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a process holds: open files by kind, threads, memory of its own."""

    descriptors: Counter[str]
    threads: int
    memory_kb: int


def held_by(pid: int) -> Held:
    links = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Held(
        descriptors=Counter(link.partition(":")[0] for link in links),
        threads=len(os.listdir(f"/proc/{pid}/task")),
        memory_kb=int(status["RssAnon"].split()[0]),
    )


@pytest.fixture(scope="module")
def data_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("data"))
    write_numbered_rows(url, NUM_ROWS, sequence_length=16, validation_rows=12)
    return url


def train_and_fail_on_rank_1(session: Session) -> None:
    for step in session.steps():
        if session.rank == 1 and step.number == 3:
            raise ValueError("bad batch in the user's own loop")
        for leaf in step.leaves():
            step.backward(leaf, session.loss(leaf))
        step.apply()
        session.step_end(step)


def train_and_stop_early(session: Session) -> None:
    for step in session.steps():
        for leaf in step.leaves():
            step.backward(leaf, session.loss(leaf))
        step.apply()
        session.step_end(step)
        if step.number == 2:
            return


def test_losses_samples_and_weights_do_not_depend_on_the_world_size(trio: Trio, data_url: str, tmp_path: Path) -> None:
    trio.make(make_settings(data_url, eval_every=3, total_steps=STEPS), tmp_path)
    by_size = {size: trio.run(size) for size in (3, 1, 2)}
    alone = by_size[1][0]
    assert [report.step for report in alone.reports] == list(range(1, STEPS + 1))
    for size, ended in by_size.items():
        assert [e.outcome.kind for e in ended] == [OutcomeKind.FINISHED] * size
        first = ended[0]
        assert [r.loss for r in first.reports] == pytest.approx([r.loss for r in alone.reports], rel=1e-4)
        assert [r.grad_norm for r in first.reports] == pytest.approx([r.grad_norm for r in alone.reports], rel=1e-3)
        assert [r.lr for r in first.reports] == [r.lr for r in alone.reports]
        assert [r.sample_chain for r in first.reports] == [r.sample_chain for r in alone.reports]
        assert [r.position for r in first.reports] == [8 * step for step in range(1, STEPS + 1)]
        assert [e.step for e in first.evals] == [3, 6]
        assert [e.loss for e in first.evals] == pytest.approx([e.loss for e in alone.evals], rel=1e-4)
        assert first.outcome.weights_digest is not None
        assert all(e.outcome.weights_digest is None for e in ended[1:])
    assert len({r.sample_chain for r in alone.reports}) == STEPS


def test_the_last_step_is_saved_on_every_rank_and_cadence_from_the_first(
    trio: Trio, data_url: str, tmp_path: Path
) -> None:
    trio.make(make_settings(data_url, every_steps=2, total_steps=5), tmp_path)
    ended = trio.run(2)
    assert [order.step for order in ended[0].bound] == [2, 4, 5]
    for rank, one in enumerate(ended):
        assert [(receipt.step, receipt.shard.rank) for receipt in one.receipts] == [(2, rank), (4, rank), (5, rank)]
    progress = ended[0].receipts[0].shared_state["progress"]
    assert (progress["step"], progress["position"]) == (2, 16)
    assert progress["sample_chain"] == ended[0].reports[1].sample_chain


def test_an_order_to_leave_lands_on_all_ranks_at_the_same_step(trio: Trio, data_url: str, tmp_path: Path) -> None:
    trio.make(make_settings(data_url, total_steps=200), tmp_path)
    ended = trio.run(3, order_after=2)
    assert [e.outcome.kind for e in ended] == [OutcomeKind.LEFT] * 3
    left_at = {e.outcome.last_step for e in ended}
    assert len(left_at) == 1
    step = left_at.pop()
    assert 4 <= step < 200
    assert [(o.number, o.kind, o.step) for o in ended[0].bound] == [(1, OrderKind.LEAVE, step)]
    assert [[receipt.step for receipt in e.receipts] for e in ended] == [[step]] * 3
    assert ended[0].reports[-1].step == step


def test_a_snapshot_order_waits_for_its_step_and_training_goes_on(trio: Trio, data_url: str, tmp_path: Path) -> None:
    trio.make(make_settings(data_url, total_steps=40), tmp_path)
    ended = trio.run(2, order_after=1, kind=OrderKind.SNAPSHOT, not_before_step=30)
    assert [e.outcome.kind for e in ended] == [OutcomeKind.FINISHED] * 2
    step = ended[0].bound[0].step
    assert step >= 30
    assert [receipt.step for receipt in ended[1].receipts] == sorted({step, 40})


def test_a_users_exception_is_reported_by_its_rank_and_echoed_by_the_others(
    trio: Trio, data_url: str, tmp_path: Path
) -> None:
    trio.replace(1)  # in the first Attempt of a process torch keeps more alive than later
    trio.make(make_settings(data_url, total_steps=STEPS), tmp_path, train_and_fail_on_rank_1)
    ended = trio.run(3, timeout_s=600.0)
    causes = [e.outcome.cause for e in ended]
    assert [e.outcome.kind for e in ended] == [OutcomeKind.FAILED] * 3
    assert [cause.kind for cause in causes] == [CauseKind.COLLECTIVE, CauseKind.USER, CauseKind.COLLECTIVE]
    assert causes[1].error_type == "ValueError"
    assert "bad batch" in causes[1].message
    assert "train_and_fail_on_rank_1" in causes[1].traceback
    assert (causes[1].rank, causes[1].step, ended[1].outcome.last_step) == (1, 3, 2)


def test_a_loop_that_returns_too_early_is_an_error_of_the_loop(trio: Trio, data_url: str, tmp_path: Path) -> None:
    trio.make(make_settings(data_url, total_steps=STEPS), tmp_path, train_and_stop_early)
    outcome = trio.run(1)[0].outcome
    assert (outcome.kind, outcome.cause.kind, outcome.cause.error_type) == (
        OutcomeKind.FAILED,
        CauseKind.USER,
        "LoopMisused",
    )


def test_abandon_frees_a_rank_that_waits_for_ever_and_releases_its_model(
    trio: Trio, data_url: str, tmp_path: Path
) -> None:
    trio.make(make_settings(data_url, total_steps=100_000), tmp_path)
    attempt = trio.start(2)
    while trio.processes[0].call("heartbeat").step < 2:
        pass
    with pytest.raises(AttemptRefused, match="still alive"):
        trio.processes[0].call("start", make_spec(trio.new_attempt(), 0, 1, trio.rendezvous.address()[1]))
    for process in trio.processes[:2]:
        process.send("abandon", attempt)
    reports = [process.receive() for process in trio.processes[:2]]
    assert all(report.is_clean and report.last_step >= 2 for report in reports)
    ended = trio.ended(attempt, (0, 1))
    assert {e.outcome.cause.kind for e in ended} <= {CauseKind.ABANDONED, CauseKind.COLLECTIVE}
    assert CauseKind.ABANDONED in {e.outcome.cause.kind for e in ended}
    assert trio.processes[0].call("heartbeat").phase is Phase.IDLE
    with pytest.raises(AttemptRefused, match="was abandoned"):
        trio.processes[0].call("start", make_spec(attempt, 0, 1, trio.rendezvous.address()[1]))


def test_abandon_ends_a_rank_that_waits_for_others_to_come(trio: Trio, data_url: str, tmp_path: Path) -> None:
    trio.make(make_settings(data_url, total_steps=STEPS), tmp_path)
    attempt = trio.new_attempt()
    trio.processes[0].call("start", make_spec(attempt, 0, 3, trio.rendezvous.address()[1], timeout_s=600.0))
    report = trio.processes[0].call("abandon", attempt)
    assert report.is_clean
    assert trio.ended(attempt, (0,))[0].outcome.cause.kind is CauseKind.ABANDONED


def test_sixteen_more_regroups_leave_nothing_more_behind(trio: Trio, data_url: str, tmp_path: Path) -> None:
    """Of a model whose state is 13 MB on each of two ranks: sixteen of them, 208 MB, would be seen. The allocator takes
    its fill by steps, and no more after some twenty regroups."""
    large = TINY_LLAMA.model_copy(
        update={"config": TINY_LLAMA.config | {"hidden_size": 256, "intermediate_size": 1024}}
    )
    trio.make(replace(make_settings(data_url, total_steps=100_000), model=large), tmp_path)
    pids = [process.pid for process in trio.processes[:2]]
    before: list[Held] = []
    for number in range(6 + 16):
        size = 2 + number % 2
        attempt = trio.start(size)
        while any(process.call("heartbeat").step < 2 for process in trio.processes[:size]):
            pass
        for process in trio.processes[:size]:
            process.send("abandon", attempt)
        assert all(process.receive().is_clean for process in trio.processes[:size])
        trio.ended(attempt, range(size))
        if number == 5:
            before = [held_by(pid) for pid in pids]
    for held, was in zip([held_by(pid) for pid in pids], before, strict=True):
        assert (held.descriptors, held.threads) == (was.descriptors, was.threads)
        assert held.memory_kb < was.memory_kb + 165_000


def test_a_rank_that_vanished_without_a_word_holds_nobody_up(trio: Trio, data_url: str, tmp_path: Path) -> None:
    """A stopped process answers nothing and closes nothing, as a machine does whose network is gone."""
    trio.make(make_settings(data_url, total_steps=100_000), tmp_path)
    attempt = trio.start(3, timeout_s=600.0)  # the groups' own time-out would come too late
    while trio.processes[2].call("heartbeat").step < 2:
        pass
    os.kill(trio.processes[2].pid, signal.SIGSTOP)
    try:
        for process in trio.processes[:2]:
            process.send("abandon", attempt)
        assert all(process.receive().is_clean for process in trio.processes[:2])
        again = trio.start(2, order_after=1)
        assert [e.outcome.kind for e in trio.ended(again, (0, 1))] == [OutcomeKind.LEFT] * 2
    finally:
        os.kill(trio.processes[2].pid, signal.SIGCONT)
        trio.replace(2)


def test_a_killed_rank_fails_the_others_at_once_and_they_regroup_warm(
    trio: Trio, data_url: str, tmp_path: Path
) -> None:
    trio.make(make_settings(data_url, total_steps=100_000), tmp_path)
    attempt = trio.start(3)
    while trio.processes[2].call("heartbeat").step < 2:
        pass
    os.kill(trio.processes[2].pid, signal.SIGKILL)
    ended = trio.ended(attempt, (0, 1))
    assert [e.outcome.cause.kind for e in ended] == [CauseKind.COLLECTIVE] * 2
    for process in trio.processes[:2]:
        process.send("abandon", attempt)
    assert all(process.receive().is_clean for process in trio.processes[:2])
    trio.replace(2)
    again = trio.start(2, order_after=1)
    assert [e.outcome.kind for e in trio.ended(again, (0, 1))] == [OutcomeKind.LEFT] * 2
