"""Training loops of a user's own, started from Python on a cluster that this process is connected to; and Ctrl-C.

Real: two Ray nodes on loopback, worker processes, FSDP over gloo, Keepers, a store of files. The loop and its model are
those of docs/user-loops.md, executed as they stand there.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray

from orchestrator.cli_checkpoints import CheckpointsCode
from orchestrator.exit_codes import ExitCode
from orchestrator.load_config import load_config
from orchestrator.options import DriverOptions
from orchestrator.run_identity import make_run_id
from orchestrator.trainer import ElasticTrainer
from storage.commit_log import CommitLog
from storage.events import read_events
from storage.local_store import LocalStore
from tests.clusters import RayNodes, ray_nodes
from tests.fakes.token_datasets import write_numbered_rows
from tests.runs import (
    GLOBAL_BATCH,
    MICRO_BATCH,
    SEED,
    SEQUENCE_LENGTH,
    Run,
    RunProcess,
    assert_all_commits_verify,
    assert_data_audit_proves,
    assert_nothing_left,
    make_run,
    write_rows,
)
from workers.proof import read_record
from workers.sample_order import sample_ids

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
NUM_ROWS = 512
STEPS, EVERY_STEPS, BAD_STEP = 12, 5, 8
TWO = {"min_workers": 2, "max_workers": 2}
Loop = Callable[[Any], None]
PLAIN_BEFORE, PLAIN_AFTER, START, ROWS, RAY_BEFORE, RAY_AFTER, INDEX, LOSS = range(8)
PLACES = {"shared": "/mnt/shared", "config": "run.yaml", "index": "s3://bucket/rows-index"}


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    # The loops below are made here; workers are other processes, which cannot import this file.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with ray_nodes(2) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def data_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("rows"))
    write_rows(url, NUM_ROWS)
    return url


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run that was started from here ended, and what it wrote."""

    exit_code: ExitCode
    run: Run
    events: list[dict[str, Any]]

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    @property
    def finish(self) -> dict[str, Any]:
        return self.named("run_finished")[-1]


def fit(
    folder: Path, data_url: str, loop: Loop | None, loop_config: dict[str, Any] | None = None, **settings: Any
) -> Ended:
    settings = {"world": TWO, "model": {"config": {}}, "optim": {"warmup_steps": 1}, **settings}
    run = make_run(folder, data_url, steps=STEPS, every_steps=EVERY_STEPS, settings=settings)
    trainer = ElasticTrainer(
        loop, loop_config, config=load_config(run.config_path), options=DriverOptions(show_progress=False)
    )
    result = trainer.fit()
    assert ray.is_initialized(), "the caller's own connection was closed"
    return Ended(exit_code=result.exit_code, run=run, events=read_events(run.events_path))


def code_blocks() -> list[str]:
    text = (ROOT / "docs" / "user-loops.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def documented_loop() -> Loop:
    return _namespace(1)["train"]  # type: ignore[no-any-return]


def _namespace(*numbers: int, **replaced: str) -> dict[str, Any]:
    """What is there after these blocks were executed one after the other, with names of places ``replaced``."""
    namespace: dict[str, Any] = {"__name__": "train_script"}
    for number in numbers:
        text = code_blocks()[number]
        for name, here in replaced.items():
            assert PLACES[name] in text or number != numbers[-1], f"{PLACES[name]} is not in block {number}"
            text = text.replace(PLACES[name], here)
        exec(compile(text, "docs/user-loops.md", "exec"), namespace)
    return namespace


class _Stumble:
    """A session that hands everything on, and raises on one rank before one step ends."""

    def __init__(self, session: Any) -> None:
        self._session = session
        config = session.loop_config
        calls = Path(config["calls"])
        calls.mkdir(exist_ok=True)
        self._call = len([name for name in os.listdir(calls) if name.startswith(f"{os.getpid()}-")])
        (calls / f"{os.getpid()}-{self._call}").touch()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def step_end(self, step: Any) -> None:
        config, session = self._session.loop_config, self._session
        if session.rank == 1 and step.number == config["step"] and self._call < config["times"]:
            raise ValueError(f"a bad sample, {config['word']}")
        session.step_end(step)


def stumbling(loop: Loop) -> Loop:
    return lambda session: loop(_Stumble(session))


# -- the loop of the docs ---------------------------------------------------------------------------------------------


def changed_lines(before: str, after: str) -> list[str]:
    """Lines of ``after`` that ``before`` has not, from its loop on."""
    old, new = ([line.strip() for line in text.splitlines() if line.strip()] for text in (before, after))
    return [line for line in difflib.ndiff(old, new) if line.startswith("+ ")]


def test_the_ports_in_the_docs_change_at_most_ten_lines() -> None:
    blocks = code_blocks()
    assert len(blocks) == 8
    plain, script = blocks[PLAIN_AFTER], blocks[RAY_AFTER]
    for before, after in (
        (blocks[PLAIN_BEFORE], plain[plain.index("def make_optimizer") :]),
        (_from_loop_on(blocks[RAY_BEFORE]), _from_loop_on(script)),
    ):
        changes = changed_lines(before, after)
        assert len(changes) <= 10, "\n".join(changes)
    compile(blocks[START], "docs/user-loops.md", "exec")


def _from_loop_on(script: str) -> str:
    return script[script.index("def train_loop_per_worker") :]


@pytest.fixture(scope="module")
def unbroken(nodes: RayNodes, data_url: str, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The loop of the docs on two workers, with no fault."""
    assert len(nodes.ids) == 2
    return fit(tmp_path_factory.mktemp("unbroken"), data_url, documented_loop())


def test_a_loop_with_a_model_and_an_optimizer_of_its_own_trains(unbroken: Ended) -> None:
    assert unbroken.exit_code is ExitCode.SUCCESS, unbroken.finish
    losses = [event["loss"] for event in unbroken.named("step")]
    assert len(losses) == STEPS
    assert sum(losses[-4:]) < sum(losses[:4]), losses
    assert unbroken.named("attempt_started")[0]["world_size"] == 2
    assert assert_all_commits_verify(unbroken.run)[-1] == STEPS


def test_an_error_that_is_retried_resumes_in_the_same_processes_to_the_same_weights(
    unbroken: Ended, data_url: str, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    ended = fit(
        tmp_path / "retried",
        data_url,
        stumbling(documented_loop()),
        {"calls": str(calls), "step": BAD_STEP, "times": 1, "word": "just once"},
        failure={"max_user_errors": 1},
    )
    assert ended.exit_code is ExitCode.SUCCESS, ended.finish
    attempts = ended.named("attempt_started")
    assert [a["cause"] for a in attempts] == ["start", "user-error"]
    assert EVERY_STEPS <= attempts[1]["restored_step"] < BAD_STEP
    assert "rank 1" in ended.named("fault")[0]["detail"]
    pids = {event["pid"] for event in ended.named("worker_ready")}
    assert len(ended.named("worker_ready")) == len(pids) == 2, "a worker process was replaced"
    assert {path.name for path in calls.iterdir()} == {f"{pid}-{call}" for pid in pids for call in (0, 1)}
    assert ended.finish["weights_digest"] == unbroken.finish["weights_digest"]


def test_the_same_loop_trains_replicated_to_the_same_losses(unbroken: Ended, data_url: str, tmp_path: Path) -> None:
    model = {"config": {}, "parallelism": "ddp"}
    ended = fit(tmp_path, data_url, documented_loop(), model=model)
    assert ended.exit_code is ExitCode.SUCCESS, ended.finish
    losses = [event["loss"] for event in ended.named("step")]
    assert losses == pytest.approx([event["loss"] for event in unbroken.named("step")], rel=1e-4)


@pytest.mark.usefixtures("nodes")
def test_a_loop_that_gives_its_loss_has_a_probe_in_every_checkpoint(data_url: str, tmp_path: Path) -> None:
    names = _namespace(PLAIN_AFTER, LOSS)

    def loop(session: Any) -> None:
        session.build(make_model=names["Net"], make_optimizer=names["make_optimizer"], loss=names["loss_of"])
        for step in session.steps():
            for leaf in step.leaves():
                step.backward(leaf, session.loss(leaf))
            step.apply()
            session.step_end(step)

    ended = fit(tmp_path, data_url, loop)
    assert ended.exit_code is ExitCode.SUCCESS, ended.finish
    log = CommitLog(LocalStore(ended.run.directory), ended.run.run_id)
    manifests = [log.read_manifest(commit) for commit in log.commits()]
    records = [read_record(manifest.shared_state) for manifest in manifests]
    assert records
    assert all(record is not None and record.skipped is None for record in records), records


# -- a Ray Train loop with its own dataset ----------------------------------------------------------------------------


@pytest.mark.usefixtures("nodes")
def test_the_ray_train_loop_of_the_docs_trains_before_the_port(tmp_path: Path) -> None:
    """What the port begins with is no straw man."""
    trainer = _namespace(PLAIN_AFTER, ROWS, RAY_BEFORE, shared=str(tmp_path))["trainer"]
    assert trainer is not None
    assert any((tmp_path / "run").iterdir())


def test_the_ray_train_loop_of_the_docs_trains_after_the_port_and_sees_each_sample_once(
    nodes: RayNodes, tmp_path: Path
) -> None:
    assert len(nodes.ids) == 2
    index = str(tmp_path / "index")
    _namespace(ROWS, INDEX, index=index)
    steps = 512 // GLOBAL_BATCH
    settings = {
        "world": TWO,
        "model": {"config": {}},
        "optim": {"warmup_steps": 1},
        "data": {"sequence_length": 2, "micro_batch": 8},
    }
    run = make_run(tmp_path, index, steps=steps, every_steps=8, settings=settings)
    run = replace(run, run_id=make_run_id("run", str(run.directory)))  # the script names it
    trainer = _namespace(PLAIN_AFTER, ROWS, RAY_AFTER, shared=str(tmp_path), config=str(run.config_path))["trainer"]
    assert trainer.config.run.url == str(tmp_path / "run")
    events = read_events(run.events_path)
    assert events[-1]["status"] == "finished", events[-1]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    assert len(losses) == steps
    assert sum(losses[-8:]) < sum(losses[:8]), losses
    assert_all_commits_verify(run)
    assert_data_audit_proves(run)


# -- the first cause is shown -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nodes")
def test_an_error_on_one_rank_ends_the_run_with_its_own_words(data_url: str, tmp_path: Path) -> None:
    loop_config = {"calls": str(tmp_path / "calls"), "step": BAD_STEP, "times": 9, "word": "row 17 of shard X"}
    ended = fit(tmp_path / "raised", data_url, stumbling(documented_loop()), loop_config)
    assert ended.exit_code is ExitCode.USER_ERROR
    assert (ended.finish["exit_code"], ended.finish["status"]) == (11, "user-error")
    assert f"rank 1, step {BAD_STEP}: ValueError: a bad sample, row 17 of shard X" in ended.finish["exit_reason"]
    assert len(ended.named("attempt_started")) == 1
    assert assert_all_commits_verify(ended.run)[-1] == EVERY_STEPS


def _file_only_rank_1_needs(num_rows: int, rows_per_file: int) -> tuple[int, int]:
    """A step after the first and a data file that a leaf of rank 1 is then the first to read."""
    leaves_per_step = GLOBAL_BATCH // MICRO_BATCH
    leaves = sample_ids(SEED, num_rows, 0, STEPS * GLOBAL_BATCH).reshape(-1, MICRO_BATCH)
    seen: set[int] = set()
    for step in range(1, STEPS + 1):
        of_step = leaves[(step - 1) * leaves_per_step : step * leaves_per_step]
        of_rank_0, of_rank_1 = ({int(row) // rows_per_file for row in of_step[rank::2].flat} for rank in (0, 1))
        if step > 1 and (only := of_rank_1 - of_rank_0 - seen):
            return step, min(only)
        seen |= of_rank_0 | of_rank_1
    raise AssertionError("no file is read by rank 1 alone")


@pytest.mark.usefixtures("nodes")
def test_an_error_in_the_reader_of_one_rank_is_the_reason_shown(tmp_path: Path) -> None:
    data = tmp_path / "numbered"
    card = write_numbered_rows(str(data), 256, sequence_length=SEQUENCE_LENGTH, row_group_rows=1)
    step, number = _file_only_rank_1_needs(256, card.files_of("train")[0].rows)
    name = card.files_of("train")[number].name
    (data / name).unlink()
    ended = fit(tmp_path / "unread", str(data), documented_loop())
    assert ended.exit_code is ExitCode.USER_ERROR, ended.finish
    reason = ended.finish["exit_reason"]
    assert f"rank 1, step {step}: DataError" in reason
    assert name in reason


@pytest.mark.usefixtures("nodes")
def test_a_model_that_cannot_be_built_ends_the_run_before_it_trains(data_url: str, tmp_path: Path) -> None:
    ended = fit(tmp_path / "run", data_url, None, model={"config": {"model_type": "no-such-family"}})
    assert ended.exit_code is ExitCode.CONFIG_ERROR
    assert "no-such-family" in ended.finish["exit_reason"]
    assert "no worker can start" in ended.finish["exit_reason"]
    assert ended.named("attempt_started") == []


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------


class _Interruptible(RunProcess):
    def interrupt(self) -> None:
        """What a terminal does on Ctrl-C: SIGINT to the whole foreground group."""
        os.killpg(self._process.pid, signal.SIGINT)


def _checkpoints(run: Run, command: str, *arguments: str) -> tuple[int, str]:
    from typer.testing import CliRunner

    from orchestrator.cli import app

    done = CliRunner().invoke(app, ["checkpoints", command, str(run.directory), *arguments])
    return done.exit_code, done.stdout


def test_ctrl_c_saves_and_stops_and_the_checkpoints_can_be_looked_at(data_url: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, data_url, steps=100_000, every_steps=50_000)
    with _Interruptible.of_cli(run, "--local-nodes", "1", "world.max_workers=1") as process:
        process.wait_for("step", 120.0, lambda event: bool(event["step"] >= 3))
        process.interrupt()
        result = process.finish(90.0)
    assert result.exit_code == ExitCode.STOPPED, result.stderr[-2000:]
    last = result.named("step")[-1]["step"]
    assert assert_all_commits_verify(run) == [last]
    assert result.summary["status"] == "stopped"
    assert_nothing_left(result)

    code, text = _checkpoints(run, "list", "--json")
    assert (code, [entry["step"] for entry in json.loads(text)]) == (0, [last])
    code, text = _checkpoints(run, "show", "--json")
    assert (code, json.loads(text)["world_size"]) == (0, 1)
    code, text = _checkpoints(run, "verify", "--json")
    assert (code, [entry["is_good"] for entry in json.loads(text)]) == (0, [True])
    shard = max((run.directory / "shards").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    body = bytearray(shard.read_bytes())
    body[len(body) // 2] ^= 1
    shard.write_bytes(body)
    code, text = _checkpoints(run, "verify", "--json")
    assert (code, [entry["is_good"] for entry in json.loads(text)]) == (CheckpointsCode.CORRUPT, [False])
    assert shard.name in text


def test_a_second_ctrl_c_ends_at_once_and_leaves_nothing(nodes: RayNodes, data_url: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, data_url, steps=100_000, every_steps=50_000, settings={"world": TWO})
    with _Interruptible.of_cli(run, "--ray-address", nodes.address) as process:
        process.wait_for("step", 120.0, lambda event: bool(event["step"] >= 3))
        process.interrupt()
        process.interrupt()
        result = process.finish(30.0)
    assert result.exit_code == ExitCode.STOPPED, result.stderr[-2000:]
    workers = {event["pid"] for event in result.named("worker_ready")}
    assert workers
    _wait_until(lambda: not [pid for pid in workers if Path(f"/proc/{pid}").exists()], "workers live on")
    assert_nothing_left(result)


def _wait_until(is_so: Callable[[], bool], complaint: str, timeout_s: float = 30.0) -> None:
    import time

    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.05)
