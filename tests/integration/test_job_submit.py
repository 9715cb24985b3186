"""`ray job submit`, as the docs tell users to: the repository travels, the run survives, and its end can be told.

Real: Ray's job server on a head, the `ray` command, two worker nodes on loopback, a node killed under a job. The jobs
write to a store of files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.job_submission import JobSubmissionClient

from orchestrator.exit_codes import ExitCode
from orchestrator.run_identity import make_run_id
from storage.arena import arena_directory
from storage.commit_log import CommitLog
from storage.events import read_events
from storage.open_store import open_store
from tests.clusters import RayNodes, ray_nodes
from tests.runs import SEQUENCE_LENGTH, VOCABULARY, Run, assert_all_commits_verify, make_run, write_rows

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
NAME = "first-run"  # in clusters/local/run.yaml
NUM_NODES = 2
_POLL_S = 0.1
_NO_AGENT = "No available agent"  # a head that has just started
_MAX_TRIES = 60
MODEL = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
}


class Jobs:
    """Submits to one cluster, and waits with limits."""

    def __init__(self, nodes: RayNodes) -> None:
        self.nodes = nodes
        self.client = JobSubmissionClient(nodes.dashboard_url)
        self._num_submitted = 0

    def submit(self, *entrypoint: str, working_dir: Path = ROOT) -> str:
        """`ray job submit --working-dir . -- ENTRYPOINT`, given in ``working_dir``; returns the job's id."""
        for _ in range(_MAX_TRIES):
            self._num_submitted += 1
            name = f"job-{self._num_submitted}"
            options = ["--working-dir", ".", "--no-wait", "--submission-id", name]
            done = self.ray("job", "submit", *options, "--", *entrypoint, cwd=working_dir)
            if done.returncode == 0:
                return name
            said = done.stdout + done.stderr
            assert _NO_AGENT in said, said
            time.sleep(_POLL_S)
        raise AssertionError(f"no job was taken in {_MAX_TRIES} tries: {said}")

    def ray(self, group: str, command: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        program = Path(sys.executable).with_name("ray")
        line = [str(program), group, command, "--address", self.nodes.dashboard_url, *arguments]
        return subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)

    def wait_end(self, job: str, timeout_s: float = 120.0) -> Any:
        """The job's details once it has ended in any way."""
        self.wait(job, lambda: self.client.get_job_status(job).is_terminal(), "end", timeout_s)
        return self.client.get_job_info(job)

    def wait_event(self, job: str, run: Run, name: str, is_it: Callable[[dict[str, Any]], bool]) -> None:
        def has_come() -> bool:
            is_over = self.client.get_job_status(job).is_terminal()
            events = read_events(run.events_path) if run.events_path.exists() else []
            if any(event["event"] == name and is_it(event) for event in events):
                return True
            assert not is_over, f"the job ended before {name} came:\n{self.logs(job)[-4000:]}"
            return False

        self.wait(job, has_come, name)

    def wait(self, job: str, is_so: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < deadline, f"no {what} within {timeout_s:g} s:\n{self.logs(job)[-4000:]}"
            time.sleep(_POLL_S)

    def logs(self, job: str) -> str:
        return str(self.client.get_job_logs(job))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Jobs]:
    with pytest.MonkeyPatch.context() as patch:
        # `python` in an entrypoint is the one that runs these tests, as it is the cluster's own on a real one.
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "30")
        patch.delenv("RAY_ADDRESS", raising=False)
        with ray_nodes(NUM_NODES, with_dashboard=True) as nodes:
            yield Jobs(nodes)


@pytest.fixture
def jobs(cluster: Jobs) -> Jobs:
    """The cluster with all of its nodes, whatever the test before killed."""
    while len(cluster.nodes.ids) < NUM_NODES:
        cluster.nodes.add()
    return cluster


@pytest.fixture(scope="module")
def data_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("rows"))
    write_rows(url, 512)
    return url


def run_at(directory: Path) -> Run:
    config_path = ROOT / "clusters" / "local" / "run.yaml"
    return Run(config_path=config_path, directory=directory, run_id=make_run_id(NAME, str(directory)))


def raysume_run(run: Run, data_url: str, *overrides: str) -> list[str]:
    """The documented entrypoint, made tiny."""
    tiny = [
        f"run.url={run.directory}",
        f"model.config={json.dumps(MODEL)}",
        f"data.url={data_url}",
        "data.prepare=null",
        f"data.sequence_length={SEQUENCE_LENGTH}",
        "eval.every_steps=null",
        f"world.max_workers={NUM_NODES}",
        "world.start_grace_s=60",
        *overrides,
    ]
    return ["python", "-m", "orchestrator", "run", "clusters/local/run.yaml", *tiny]


def test_a_job_outlives_one_of_its_nodes_and_gets_its_arguments_as_they_were_given(
    jobs: Jobs, data_url: str, tmp_path: Path
) -> None:
    shell_was_here = tmp_path / "shell-was-here"
    run = run_at(tmp_path / 'it\'s; "a" `run` $HOME')
    text = f"x y; echo $HOME `touch {shell_was_here}` \\ 'q' \"d\" $(touch {shell_was_here}) & | > *"
    extra = f"model.config.extra={json.dumps({'b': text})}"
    job = jobs.submit(*raysume_run(run, data_url, "run.steps=200", "checkpoint.every_steps=20", extra))
    jobs.wait_event(job, run, "committed", lambda event: bool(event["step"] >= 20))
    lost = jobs.nodes.ids[0]
    jobs.nodes.kill(lost)
    shutil.rmtree(arena_directory(run.run_id, lost))  # a lost machine takes its memory along
    info = jobs.wait_end(job)

    assert (info.status, info.driver_exit_code) == ("SUCCEEDED", 0), jobs.logs(job)[-4000:]
    events = read_events(run.events_path)
    attempts = [event for event in events if event["event"] == "attempt_started"]
    assert [(attempt["cause"], attempt["world_size"]) for attempt in attempts] == [("start", 2), ("node-lost", 1)]
    assert assert_all_commits_verify(run)[-1] == 200
    log = CommitLog(open_store(str(run.directory)), run.run_id)
    metadata: dict[str, Any] = log.read_manifest(log.commits()[-1]).metadata
    assert metadata["config"]["model"]["config"]["extra"] == {"b": text}
    assert metadata["config"]["run"]["url"] == str(run.directory)
    assert not shell_was_here.exists()
    assert sorted(Path("/dev/shm").glob(f"raysume-{run.run_id}*")) == []
    assert metadata["git_commit"] is None, "the job did not run in a copy without .git"


def test_what_is_ignored_does_not_travel(jobs: Jobs, tmp_path: Path) -> None:
    kept = ["orchestrator/code.py", ".gitignore"]
    left = [
        ".git/objects/pack",
        ".venv/lib/torch.so",
        "outputs/data/rows.parquet",
        "outputs/run/shards/1",
        "a/__pycache__/b.pyc",
    ]
    for name in (*kept, *left):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(120 << 20 if name in left else 10)
    (tmp_path / ".gitignore").write_bytes((ROOT / ".gitignore").read_bytes())
    job = jobs.submit("find", ".", "-type", "f", working_dir=tmp_path)
    assert jobs.wait_end(job).status == "SUCCEEDED"
    found = {line.removeprefix("./") for line in jobs.logs(job).splitlines() if line.startswith("./")}
    assert found == set(kept)


def test_a_directory_that_is_too_large_is_refused_before_the_job(jobs: Jobs, tmp_path: Path) -> None:
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(120 << 20)
    with pytest.raises(RuntimeError, match="413"):
        jobs.client.submit_job(entrypoint="true", runtime_env={"working_dir": str(tmp_path)})


def test_a_job_whose_loop_raises_fails_and_shows_rank_and_error(jobs: Jobs, data_url: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "user-loops.md").read_text(), re.DOTALL)
    _, loop, start, *_ = blocks
    broken = (
        "\n\ndef broken(session):\n    if session.rank == 1:\n"
        "        raise ValueError('row 17 of shard X has no label')\n    train(session)\n\n"
    )
    folder = tmp_path / "mine"
    settings: dict[str, dict[str, Any]] = {"world": {"min_workers": 2, "max_workers": 2}, "model": {"config": {}}}
    run = make_run(folder, data_url, steps=20, every_steps=5, settings=settings)
    (folder / "train.py").write_text(loop + broken + start.replace("ElasticTrainer(train,", "ElasticTrainer(broken,"))
    job = jobs.submit("python", "train.py", working_dir=folder)
    info = jobs.wait_end(job)
    logs = jobs.logs(job)
    assert (info.status, info.driver_exit_code) == ("FAILED", ExitCode.USER_ERROR), logs[-4000:]
    assert "rank 1, step 1: ValueError: row 17 of shard X has no label" in logs
    assert f"exit code {ExitCode.USER_ERROR.value}" in info.message
    assert read_events(run.events_path)[-1]["status"] == "user-error"


def test_a_loop_named_on_the_command_line_travels_with_its_directory(jobs: Jobs, data_url: str, tmp_path: Path) -> None:
    loop = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "user-loops.md").read_text(), re.DOTALL)[1]
    folder = tmp_path / "mine"
    settings: dict[str, dict[str, Any]] = {"world": {"max_workers": NUM_NODES}, "model": {"config": {}}}
    run = make_run(folder, data_url, steps=8, every_steps=4, settings=settings)
    (folder / "my_train.py").write_text(f"import beside\n\n{loop}")
    (folder / "beside.py").write_text("")
    entrypoint = ["python", "-m", "orchestrator", "run", "run.yaml", "--loop"]
    info = jobs.wait_end(jobs.submit(*entrypoint, "my_train:train", working_dir=folder))
    assert (info.status, info.driver_exit_code) == ("SUCCEEDED", 0), info.message
    assert assert_all_commits_verify(run)[-1] == 8
    job = jobs.submit(*entrypoint, "my_train:trian", "run.url=./other", working_dir=folder)
    assert jobs.wait_end(job).driver_exit_code == ExitCode.CONFIG_ERROR
    assert "my_train.py has no trian; it has" in jobs.logs(job)


def test_a_config_error_fails_the_job_with_its_code_and_the_way_out(jobs: Jobs, data_url: str, tmp_path: Path) -> None:
    run = run_at(tmp_path / "run")
    job = jobs.submit(*raysume_run(run, data_url, "run.step=3"))
    info = jobs.wait_end(job)
    assert (info.status, info.driver_exit_code) == ("FAILED", ExitCode.CONFIG_ERROR)
    assert "unknown key run.step; the nearest valid one is run.steps" in info.message
    assert not run.directory.exists()


def test_a_stopped_job_has_committed_its_last_step(jobs: Jobs, data_url: str, tmp_path: Path) -> None:
    run = run_at(tmp_path / "run")
    job = jobs.submit(*raysume_run(run, data_url, "run.steps=100000", "checkpoint.every_steps=50000"))
    jobs.wait_event(job, run, "step", lambda event: bool(event["step"] >= 3))
    done = jobs.ray("job", "stop", job)
    assert done.returncode == 0, done.stdout + done.stderr
    assert jobs.wait_end(job).status == "STOPPED"
    events = read_events(run.events_path)
    assert (events[-1]["event"], events[-1].get("status")) == ("run_finished", "stopped"), jobs.logs(job)[-4000:]
    last = max(event["step"] for event in events if event["event"] == "step")
    assert assert_all_commits_verify(run) == [last]
    assert sorted(Path("/dev/shm").glob(f"raysume-{run.run_id}*")) == []
