"""Whatever a restore leaves out, the drill's comparison finds it at once.

Real: a worker process, FSDP2 on gloo, the Session, Keeper, store, Manifest and restore, the trace, and events as the
driver writes them. The kill between the two halves is imagined: the same process goes on from what was stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.chaos import parse_chaos
from orchestrator.drill_compare import Comparison, compare
from orchestrator.drill_history import History, read_history
from orchestrator.drill_rules import EVALUATION, EXACT, OPTIMIZER, OWN, RNG, ROUNDED, Rules
from orchestrator.recorder import Recorder
from orchestrator.signals import StepFinished
from storage.commit_log import CommitLog
from storage.keys import Attempt, StepKey
from storage.merge import merge_receipts
from storage.open_store import open_store
from storage.sources import RestorePlan, ShardLocation
from tests.fakes.mutated_restore import PARTS, MutatedLoop, Part
from tests.fakes.rank_processes import Ended, Trio
from tests.fakes.token_datasets import write_numbered_rows
from tests.fakes.worker_settings import TINY_LLAMA, make_settings
from workers.config import OptimConfig
from workers.contract import OutcomeKind, StepReport
from workers.settings import WorkerSettings

STEPS, SAVED_STEP = 8, 4
FIRST = ("start", 1, 0)
SECOND = ("worker-lost", 2, SAVED_STEP)


@dataclass(slots=True)
class Sink:
    """Keeps events as a file would."""

    events: list[dict[str, Any]] = field(default_factory=list)

    def emit(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, "t_s": float(len(self.events)), **fields})


def told(
    *lives: tuple[tuple[str, int, int], Sequence[StepReport]], digest: str | None, sizes: tuple[int, int] = (1, 1)
) -> list[dict[str, Any]]:
    """The events of a driver that saw these Attempts: cause, number and restored step of each, and its reports."""
    sink = Sink()
    recorder = Recorder(sink, start_unix_s=0.0)
    recorder.emit("run_started", run_id="run", is_new=True)
    for (cause, number, restored), reports in lives:
        if number > 1:
            recorder.emit(
                "chaos", verb="kill-worker", planned_step=SAVED_STEP, at_step=SAVED_STEP + 1, detail="", pid=number - 1
            )
        recorder.emit("worker_ready", worker="w", node_id="n", pid=number)
        attempt = Attempt(number=number, nonce="0badcafe")
        recorder.attempt_started(
            attempt,
            sizes[number - 1],
            cause=cause,
            restored_step=restored,
            restored_from="own-memory",
            members=["w"],
        )
        recorder.record(StepFinished(attempt=attempt, report=report) for report in reports)
    recorder.emit("run_finished", status="finished", exit_reason="", weights_digest=digest)
    return sink.events


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A run that was not interrupted, a plan that restores its step, and the process that can go on from there."""

    process: Trio
    settings: WorkerSettings
    root: Path
    whole: Ended
    plan: RestorePlan

    def resumed(self, left_out: Part | None, *, size: int = 1) -> tuple[History, History]:
        """Go on from the stored step with a restore that leaves a part out; what is to be compared."""
        self.process.make(self.settings, self.root, MutatedLoop(left_out=left_out))
        ended = self.process.run(size, restore=self.plan)[0]
        assert ended.outcome.kind is OutcomeKind.FINISHED, ended.outcome.cause
        before = [report for report in self.whole.reports if report.step <= SAVED_STEP + 1]
        whole = told((FIRST, self.whole.reports), digest=self.whole.outcome.weights_digest)
        lives = (FIRST, before), (SECOND, ended.reports)
        other = told(*lives, digest=ended.outcome.weights_digest, sizes=(1, size))
        return read_history(whole), read_history(other)


def judged(histories: tuple[History, History], rules: Rules = EXACT) -> Comparison:
    return compare(*histories, rules=rules, num_steps=STEPS, planned=parse_chaos(f"kill-worker@{SAVED_STEP}"))


@pytest.fixture(scope="module")
def processes() -> Iterator[Trio]:
    processes = Trio(2)
    try:
        yield processes
    finally:
        processes.close()


def make_scene(processes: Trio, folder: Path, **changes: Any) -> Scene:
    """With dropout, a schedule that has not ended and loss scaling, so that every part matters."""
    data, root = folder / "data", folder / "root"
    write_numbered_rows(str(data), 200, sequence_length=16, validation_rows=12)
    settings = replace(
        make_settings(str(data), every_steps=SAVED_STEP, total_steps=STEPS),
        model=TINY_LLAMA.model_copy(update={"config": {**TINY_LLAMA.config, "attention_dropout": 0.2}}),
        optim=OptimConfig(lr=1e-2, warmup_steps=3, loss_scaling=True),
        trace_every=1,
        **changes,
    )
    processes.make(settings, root, MutatedLoop(left_out=None))
    whole = processes.run(1)[0]
    assert whole.outcome.kind is OutcomeKind.FINISHED, whole.outcome.cause
    return Scene(process=processes, settings=settings, root=root, whole=whole, plan=plan_for(root, whole))


@pytest.fixture(scope="module")
def scene(processes: Trio, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(processes, tmp_path_factory.mktemp("scene"))


def plan_for(root: Path, ended: Ended) -> RestorePlan:
    """Make the Manifest of the saved step and the plan that reads it."""
    receipts = [receipt for receipt in ended.receipts if receipt.step == SAVED_STEP]
    manifest = merge_receipts(receipts, time_utc="2026-01-01T00:00:00Z", metadata={}, ledger=None)
    key, num_bytes, digest = CommitLog(open_store(str(root)), "run").write_manifest(manifest)
    attempt = manifest.attempt.value()
    shards = [ShardLocation(rank=one.rank, tier="object-storage", location=one.key) for one in manifest.shards]
    return RestorePlan(
        attempt=attempt,
        source=StepKey(step=SAVED_STEP, attempt=attempt),
        root_url=str(root),
        manifest_key=key,
        manifest_bytes=num_bytes,
        manifest_digest=digest,
        shards=tuple(shards),
    )


def test_a_whole_restore_is_the_same_run_to_the_bit(scene: Scene) -> None:
    found = judged(scene.resumed(None))
    assert (found.is_same, found.first, found.problems) == (True, (), ())
    assert min(found.num_compared.values()) == STEPS
    assert EXACT.keys() - found.num_compared.keys() == {EVALUATION, OWN}, "a quantity was not compared"


def test_where_bits_are_promised_twice_the_ranks_make_the_same_run_in_every_quantity(
    processes: Trio, tmp_path: Path
) -> None:
    found = judged(make_scene(processes, tmp_path, reproducible=True).resumed(None, size=2))
    assert (found.is_same, found.first, found.problems) == (True, (), ())
    assert found.world_differs_at == SAVED_STEP + 1
    assert found.num_compared[RNG] == found.num_compared[OPTIMIZER] == STEPS


SEEN_BY: dict[Part, set[str]] = {
    "moments": {"optimizer_digest", "weights_digest"},
    "step counters": {"optimizer_digest", "weights_digest"},
    "scheduler": {"schedule_digest"},
    "scaler": {"schedule_digest"},
    "rng": {"loss", "rng_digest"},
    "data position": {"position", "sample_chain", "loss"},
}


@pytest.mark.parametrize("left_out", PARTS)
def test_what_a_restore_leaves_out_is_found_at_the_first_step_after_it(scene: Scene, left_out: Part) -> None:
    """At one number of workers both modes demand the same bits."""
    histories = scene.resumed(left_out)
    for rules in (EXACT, ROUNDED):
        found = judged(histories, rules)
        assert not found.is_same
        assert found.first[0].step == SAVED_STEP + 1
        assert {one.quantity.field for one in found.first} >= SEEN_BY[left_out]
        assert found.last_strike is not None
        assert found.last_strike.verb == "kill-worker"
