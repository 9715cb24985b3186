"""The supervisor's loop: cluster and driver are doubles, event file, schedule and shared memory are real."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator import chaos_deeds, supervisor
from orchestrator.chaos import parse_chaos
from orchestrator.exit_codes import ExitCode
from orchestrator.load_config import load_config
from orchestrator.local_cluster import LocalNode, chaos_directory, is_running
from orchestrator.progress import ProgressView
from orchestrator.summary import Event
from orchestrator.supervisor import Supervisor, SupervisorPlan
from storage.arena import arena_directory
from storage.events import EventLog, read_events

RUN_ID = "supervisor-test"


class FakeView:
    """Keeps the lines a person would see."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_event(self, event: Event) -> None: ...

    def note(self, line: str) -> None:
        self.lines.append(line)

    def close(self) -> None: ...


class FakeCluster:
    """Nodes that are mere records; remembers what was done to them, in order."""

    address = "127.0.0.1:1"
    host = "127.0.0.1"

    def __init__(self, directory: Path, num_nodes: int, raylet_pid: int = 0) -> None:
        self._directory, self._raylet_pid, self._started = directory, raylet_pid, 0
        self.nodes: dict[int, LocalNode] = {}
        self.started_node_ids: tuple[str, ...] = ("head",)
        self.done: list[str] = []
        for _ in range(num_nodes):
            self.add_node()
        self.done.clear()

    def add_node(self) -> LocalNode:
        self._started += 1
        number = self._started
        self.started_node_ids = (*self.started_node_ids, f"node{number}")
        node = LocalNode(number=number, node_id=f"node{number}", raylet_pid=self._raylet_pid,
                         directory=self._directory, handle=None)  # fmt: skip
        self.nodes[number] = node
        self.done.append(f"add {number}")
        return node

    def kill_node(self, number: int) -> LocalNode:
        self.done.append(f"kill {number}")
        return self.nodes.pop(number)

    def bury(self, node: LocalNode) -> None:
        self.done.append(f"bury {node.number}")

    def drain_node(self, number: int, *, notice_s: float) -> LocalNode:
        self.done.append(f"drain {number} {notice_s:g}")
        return self.nodes[number]

    def cut_node(self, number: int) -> LocalNode:
        self.done.append(f"cut {number}")
        return self.nodes.pop(number)

    def restart_head(self) -> int:
        self.done.append("restart head")
        return 4

    def close(self) -> None:
        self.nodes.clear()


class FakeDriver:
    """Emits its steps one a poll, then ends with ``code``. Dies of SIGKILL; leaves with 14 at SIGTERM or SIGINT."""

    def __init__(self, log: EventLog, pid: int, steps: range, code: int, on_step: Callable[[int], None]) -> None:
        self.pid, self._log, self._steps, self._code, self._on_step = pid, log, iter(steps), code, on_step
        self.received: list[int] = []
        self._ending: int | None = None
        log.emit("run_started", run_id=RUN_ID, steps=9, url="", start_unix_s=1000.0)
        log.emit("driver_started", nonce="0", pid=pid)

    def wait(self, timeout_s: float) -> int | None:
        assert timeout_s < 1
        if self._ending is not None:
            return self._ending
        step = next(self._steps, None)
        if step is None:
            return self._code
        self._on_step(step)
        self._log.emit("step", attempt=1, step=step, loss=1.0)
        return None

    def send(self, number: int) -> None:
        self.received.append(number)
        self._ending = -signal.SIGKILL if number == signal.SIGKILL else int(ExitCode.STOPPED)

    def close(self) -> None: ...

    def copy_output(self) -> None: ...


class Stage:
    """A supervisor with doubles; ``lives`` gives the steps and exit code of each driver in turn."""

    def __init__(self, tmp_path: Path, chaos: str, lives: list[tuple[range, int]], *, nodes: int = 3, raylet: int = 0):
        self.events = tmp_path / "events.jsonl"
        self.log = EventLog(self.events, RUN_ID, started_at_s=1000.0)
        self.cluster = FakeCluster(tmp_path, nodes, raylet)
        self.view = FakeView()
        self.stops: list[int] = []
        self.on_step: Callable[[int], None] = lambda _step: None
        self.started: list[tuple[str, ...]] = []
        self.drivers: list[FakeDriver] = []
        self._lives = iter(lives)
        self.plan = SupervisorPlan(
            config=load_config(Path("clusters/local/run.yaml")), config_path=Path("run.yaml"), overrides=("seed=0",),
            num_nodes=nodes, actions=parse_chaos(chaos) if chaos else (), events_path=self.events, run_id=RUN_ID,
        )  # fmt: skip
        view: ProgressView = self.view
        self.supervisor = Supervisor(self.plan, self.cluster, self._start, view, self.stops)

    def _start(self, overrides: tuple[str, ...]) -> FakeDriver:
        steps, code = next(self._lives)
        self.started.append(overrides)
        driver = FakeDriver(self.log, 100 + len(self.started), steps, code, lambda step: self.on_step(step))
        self.drivers.append(driver)
        return driver

    def chaos(self) -> list[tuple[str, str | None, int, int]]:
        found = [event for event in read_events(self.events) if event["event"] == "chaos"]
        return [(event["verb"], event["node_id"], event["planned_step"], event["at_step"]) for event in found]


def test_a_node_is_killed_and_buried_and_one_is_added_when_their_steps_come(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "kill-node:2@3,add-node@5", [(range(1, 9), 0)])
    arena = arena_directory(RUN_ID, "node2")
    arena.mkdir(exist_ok=True)
    (arena / "buffer").write_bytes(b"x")
    assert stage.supervisor.run() == 0
    assert stage.cluster.done == ["kill 2", "bury 2", "add 4"]
    assert stage.chaos() == [("kill-node", "node2", 3, 3), ("add-node", "node4", 5, 5)]
    assert not arena.exists()


def test_a_node_s_line_is_stamped_just_before_it_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(tmp_path, "add-node@2", [(range(1, 4), 0)])
    clock = [1010.0]
    monkeypatch.setattr(chaos_deeds, "time", SimpleNamespace(time=lambda: clock[0], monotonic=time.monotonic))
    add_node = stage.cluster.add_node

    def add_slowly() -> LocalNode:
        clock[0] += 5.0
        return add_node()

    monkeypatch.setattr(stage.cluster, "add_node", add_slowly)
    assert stage.supervisor.run() == 0
    (line,) = [event for event in read_events(stage.events) if event["event"] == "chaos"]
    assert line["t_s"] == pytest.approx(10.0)


def test_only_shared_memory_of_the_supervisors_own_nodes_is_removed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same Run may be alive on another cluster of this machine; then this driver is refused."""
    stage = Stage(tmp_path, "kill-node:2@3", [(range(1, 6), ExitCode.REFUSED)], nodes=0)
    monkeypatch.setattr(supervisor, "LocalCluster", lambda **_: stage.cluster)
    monkeypatch.setattr(supervisor, "DriverChild", lambda *_: stage._start(()))
    own = [arena_directory(RUN_ID, node_id) for node_id in ("head", "node1", "node2", "node3")]
    foreign = arena_directory(RUN_ID, "node9")
    for arena in (*own, foreign):
        arena.mkdir(exist_ok=True)
    # What is killed has its memory removed at once; this stands for a process that wrote once more.
    monkeypatch.setattr(stage.cluster, "bury", lambda node: arena_directory(RUN_ID, node.node_id).mkdir())
    try:
        assert supervisor.supervise(replace(stage.plan, num_nodes=3, show_progress=False)) == ExitCode.REFUSED
        assert [arena for arena in own if arena.exists()] == []
        assert foreign.exists()
    finally:
        shutil.rmtree(foreign)


def test_steps_of_an_earlier_life_of_the_run_set_nothing_off(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "kill-node:2@30", [(range(1, 4), 0)])
    stage.log.emit("driver_started", nonce="0", pid=7)
    stage.log.emit("step", attempt=1, step=90, loss=1.0)
    assert stage.supervisor.run() == 0
    assert stage.cluster.done == []
    assert any("kill-node:2@30 never happened" in line for line in stage.view.lines)


def test_a_killed_driver_is_started_again_and_told_to_go_on(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "kill-driver@3", [(range(1, 99), 0), (range(3, 6), 0)])
    assert stage.supervisor.run() == 0
    assert stage.started == [("seed=0",), ("seed=0", "run.resume=auto")]
    assert stage.chaos() == [("kill-driver", None, 3, 3)]


def test_a_driver_that_died_by_itself_is_not_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(tmp_path, "", [(range(1, 4), -signal.SIGSEGV)])
    stage.on_step = lambda step: stage.log.emit("committed", step=2) if step == 3 else None
    assert (stage.supervisor.run(), len(stage.started)) == (ExitCode.INTERNAL_ERROR, 1)
    assert "newest checkpoint: step 2; step 3 will be trained again" in caplog.text


@pytest.mark.parametrize("code", [ExitCode.SUCCESS, ExitCode.USER_ERROR, ExitCode.REFUSED])
def test_the_drivers_exit_code_is_handed_on(tmp_path: Path, code: ExitCode) -> None:
    assert Stage(tmp_path, "", [(range(1, 3), code)]).supervisor.run() == code


def test_a_drained_node_is_killed_when_its_notice_is_over(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "drain-node:1@2:0s", [(range(1, 6), 0)])
    assert stage.supervisor.run() == 0
    assert stage.cluster.done == ["drain 1 0", "kill 1", "bury 1"]
    assert [verb for verb, *_ in stage.chaos()] == ["drain-node", "drain-deadline"]


def test_a_target_that_is_gone_is_said_loudly_and_not_recorded_as_done(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "kill-node:1@2,kill-node:1@3", [(range(1, 6), 0)])
    assert stage.supervisor.run() == 0
    assert stage.chaos() == [("kill-node", "node1", 2, 2)]
    assert any("kill-node:1@3 did NOT happen: " in line for line in stage.view.lines)


def test_a_deed_that_the_cluster_fails_is_said_loudly_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(tmp_path, "drain-node:1@2:5s,kill-node:2@3", [(range(1, 6), 0)])

    def fail(_number: int, *, notice_s: float) -> LocalNode:
        raise ConnectionError(f"the head is away, notice of {notice_s:g} s")

    monkeypatch.setattr(stage.cluster, "drain_node", fail)
    assert stage.supervisor.run() == 0
    assert any("drain-node:1@2:5s did NOT happen" in line and "head is away" in line for line in stage.view.lines)
    assert stage.chaos() == [("kill-node", "node2", 3, 3)]


def test_a_signal_is_passed_on_once_and_the_run_counts_as_stopped(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "kill-node@3", [(range(1, 99), 0)])
    stage.on_step = lambda step: stage.stops.append(signal.SIGTERM) if step == 2 else None
    assert stage.supervisor.run() == ExitCode.STOPPED
    assert stage.drivers[0].received == [signal.SIGTERM]
    assert stage.cluster.done == []


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    code = "print(flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()  # it is past its start
    yield process
    process.kill()
    process.wait(10)


@pytest.mark.parametrize(("verb", "state"), [("kill-worker", "gone"), ("stop-worker", "stopped")])
def test_a_worker_process_is_really_killed_or_stopped(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], verb: str, state: str
) -> None:
    stage = Stage(tmp_path, f"{verb}:1@2", [(range(1, 4), 0)], nodes=1, raylet=os.getpid())
    stage.on_step = lambda _step: stage.log.emit("worker_ready", worker="w", node_id="node1", pid=sleeper.pid)
    assert stage.supervisor.run() == 0
    assert stage.chaos() == [(verb, "node1", 2, 2)]
    _, status = os.waitpid(sleeper.pid, os.WUNTRACED)
    assert (os.WIFSIGNALED(status), os.WIFSTOPPED(status)) == (state == "gone", state == "stopped")


def test_a_starved_worker_lives_but_gets_no_more_memory(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    stage = Stage(tmp_path, "oom-worker:1@2", [(range(1, 4), 0)], nodes=1, raylet=os.getpid())
    stage.on_step = lambda _step: stage.log.emit("worker_ready", worker="w", node_id="node1", pid=sleeper.pid)
    assert stage.supervisor.run() == 0
    assert stage.chaos() == [("oom-worker", "node1", 2, 2)]
    limit, _ = resource.prlimit(sleeper.pid, resource.RLIMIT_DATA)
    assert 0 < limit < 1 << 40
    assert is_running(sleeper.pid)


def test_a_worker_is_told_to_raise_through_its_door_and_one_without_is_said_loudly(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    stage = Stage(tmp_path, "raise-in-worker:1@2,raise-in-worker:1@3", [(range(1, 6), 0)], nodes=1, raylet=os.getpid())
    pipe = chaos_directory(stage.cluster.nodes[1]) / str(sleeper.pid)
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    stage.on_step = lambda step: (
        stage.log.emit("worker_ready", worker="w", node_id="node1", pid=sleeper.pid),
        os.close(reader) if step == 3 else None,
    )[0]
    assert stage.supervisor.run() == 0
    assert stage.chaos() == [("raise-in-worker", "node1", 2, 2)]
    assert any("raise-in-worker:1@3 did NOT happen: " in line for line in stage.view.lines)


def test_a_fault_that_waits_for_a_save_strikes_when_one_begins(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "kill-node:2@during-save,kill-node:1@4+save", [(range(1, 9), 0)])
    stage.on_step = lambda step: stage.log.emit("save_bound", step=step) if step in (3, 6) else None
    assert stage.supervisor.run() == 0
    assert stage.cluster.done == ["kill 2", "bury 2", "kill 1", "bury 1"]
    assert [(node, step) for _, node, _, step in stage.chaos()] == [("node2", 3), ("node1", 6)]


@pytest.mark.parametrize(("verb", "deed"), [("cut-node:2", "cut 2"), ("restart-head", "restart head")])
def test_a_link_is_cut_and_a_head_restarted(tmp_path: Path, verb: str, deed: str) -> None:
    stage = Stage(tmp_path, f"{verb}@2", [(range(1, 5), 0)])
    assert stage.supervisor.run() == 0
    assert stage.cluster.done == [deed]
    assert [entry[0] for entry in stage.chaos()] == [verb.partition(":")[0]]


def test_a_driver_that_loses_its_head_is_started_again_as_a_job_system_would(tmp_path: Path) -> None:
    lives = [(range(1, 4), ExitCode.INTERNAL_ERROR), (range(4, 6), 0)]
    stage = Stage(tmp_path, "restart-head@2", [(steps, int(code)) for steps, code in lives])
    assert stage.supervisor.run() == 0
    assert stage.started == [("seed=0",), ("seed=0", "run.resume=auto")]


def test_a_driver_that_ends_with_a_verdict_of_its_own_is_not_started_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "restart-head@2", [(range(1, 4), int(ExitCode.FAILURE_BUDGET))])
    assert stage.supervisor.run() == ExitCode.FAILURE_BUDGET
    assert len(stage.started) == 1


def test_what_lasts_ends_in_time_or_with_the_run(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    stage = Stage(tmp_path, "slow-node:1@2:0.001s,slow-node:1@3", [(range(1, 9), 0)], nodes=1, raylet=os.getpid())
    stage.on_step = lambda _step: stage.log.emit("worker_ready", worker="w", node_id="node1", pid=sleeper.pid)
    assert stage.supervisor.run() == 0
    assert sorted(verb for verb, *_ in stage.chaos()) == ["slow-node", "slow-node", "slow-node-over"]
    assert not [thread for thread in threading.enumerate() if thread.name == "slowed-node"]


@pytest.mark.parametrize("verb", ["slow-node", "stop-worker", "kill-keeper"])
def test_a_fault_of_a_node_that_has_nothing_to_hit_is_refused_with_the_reason(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], verb: str
) -> None:
    stage = Stage(tmp_path, f"{verb}:2@2", [(range(1, 4), 0)], nodes=2, raylet=os.getpid())
    stage.on_step = lambda _: stage.log.emit("worker_ready", worker="w", node_id="node1", pid=sleeper.pid)
    assert (stage.supervisor.run(), stage.chaos()) == (0, [])
    none = "Keeper just now; nodes with one: none" if verb == "kill-keeper" else "worker just now; nodes with one: 1"
    assert stage.view.lines == [f"chaos: {verb}:2@2 did NOT happen: node 2 lives, but has no {none}"]


def test_a_slow_node_is_refused_while_no_node_has_a_worker(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "slow-node@2", [(range(1, 4), 0)])
    assert (stage.supervisor.run(), stage.chaos()) == (0, [])
    assert stage.view.lines == ["chaos: slow-node@2 did NOT happen: no node has a worker just now"]


def test_a_store_that_is_not_reached_through_the_supervisor_is_not_said_to_be_away(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "store-outage@2:5s", [(range(1, 5), 0)])
    assert (stage.supervisor.run(), stage.chaos()) == (0, [])
    assert any("store-outage@2:5s did NOT happen" in line for line in stage.view.lines)


def test_a_process_that_is_not_the_nodes_is_never_hit(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    stage = Stage(tmp_path, "kill-worker@2", [(range(1, 4), 0)], nodes=1, raylet=sleeper.pid)
    stage.on_step = lambda _step: stage.log.emit("worker_ready", worker="w", node_id="node1", pid=sleeper.pid)
    assert (stage.supervisor.run(), stage.chaos()) == (0, [])
    assert is_running(sleeper.pid)


@pytest.mark.parametrize("course", ["kill-node@2", "cut-node@2", "drain-node@2:0s", "kill-worker@2"])
def test_where_none_is_named_a_node_is_hit_that_trains(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], course: str
) -> None:
    stage = Stage(tmp_path, course, [(range(1, 4), 0)], nodes=8, raylet=os.getpid())

    def tell(_: int) -> None:
        stage.log.emit("worker_ready", worker="spare", node_id="node7", pid=sleeper.pid)
        stage.log.emit("worker_ready", worker="member", node_id="node5", pid=sleeper.pid)
        stage.log.emit("attempt_started", attempt=1, members=["member"])

    stage.on_step = tell
    assert stage.supervisor.run() == 0
    assert {node_id for _, node_id, _, _ in stage.chaos()} == {"node5"}
