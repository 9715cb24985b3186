"""Raysume itself, driven like its peers: the same models, the same cluster, the same kill at a moment drawn by seed.

Run as a module it is the driver of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from orchestrator.local_cluster import LocalCluster
from tests.bench.peers.leftovers import remove_arenas
from tests.bench.peers.models import RUN_CONFIG
from tests.bench.peers.steps import Kill, first_after, read_steps, wait_for_step

if TYPE_CHECKING:
    from workers.session import Session

__all__ = ["Recovery", "measure"]

Fault = Literal["kill-node", "kill-worker", "stop-worker"]
_START_S = 240.0
_RECOVERY_S = 120.0
_MOST_STEPS = 10_000
_LOOK_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Recovery(Kill):
    """With where the state came from and what the recovery's time went into, as the run's own events tell."""

    tiers: dict[str, int]
    phases: dict[str, float]


def measure(
    fault: Fault, *, model: Literal["llama", "mlp"], kill_at: int, seed: int, overrides: tuple[str, ...] = ()
) -> Recovery:
    """One run on four local nodes with one fault at a random moment of the step after ``kill_at``."""
    draw = random.Random(seed)
    cluster = LocalCluster(node_resources={"CPU": 1})
    with tempfile.TemporaryDirectory(prefix="raysume-bench-") as scratch:
        events = Path(scratch) / "events.jsonl"
        steps = Path(scratch) / "steps.jsonl"
        driver: subprocess.Popen[bytes] | None = None
        try:
            for _ in range(4):
                cluster.add_node()
            command = [sys.executable, "-m", "tests.bench.peers.raysume", "--address", cluster.address]
            command += ["--scratch", scratch, "--model", model, *overrides]
            log = (Path(scratch) / "driver.log").open("wb")
            driver = subprocess.Popen(command, stdout=log, stderr=log)
            follow = _Follower(events, steps)
            wait_for_step(follow.path, kill_at, _START_S, follow.look)
            time.sleep(draw.random() * read_steps(steps)[-1]["step_s"])
            number = draw.choice(sorted(cluster.nodes))
            node = cluster.nodes[number]
            killed_at = time.time()
            if fault == "kill-node":
                killed = cluster.kill_node(number)
                remove_arenas([killed.node_id])
                cluster.bury(killed)
            else:
                pid = follow.worker_on(node.node_id)
                os.kill(pid, signal.SIGKILL if fault == "kill-worker" else signal.SIGSTOP)
            world_size = 3
            kill = first_after(steps, killed_at, _RECOVERY_S, world_size=world_size, look=follow.look)
            follow.wait_told(_RECOVERY_S)
            return Recovery(**asdict(kill), tiers=follow.tiers(), phases=follow.phases())
        finally:
            if driver is not None:
                driver.kill()
                driver.wait(timeout=30)
            cluster.close()
            remove_arenas(cluster.started_node_ids)


class _Follower:
    """Turns the run's events into step lines as the peers write them."""

    def __init__(self, events: Path, steps: Path) -> None:
        self._events, self.path = events, steps
        self._seen = 0
        self._started_at = 0.0
        self._all: list[dict[str, Any]] = []

    def look(self) -> None:
        if not self._events.exists():
            return
        text = self._events.read_text()
        lines = text[: text.rfind("\n") + 1].splitlines()
        new, self._seen = lines[self._seen :], len(lines)
        with self.path.open("a") as out:
            for event in map(json.loads, new):
                self._all.append(event)
                if event["event"] == "run_started":
                    self._started_at = float(event["start_unix_s"])
                if event["event"] == "step":
                    line = {name: event[name] for name in ("step", "step_s", "world_size")}
                    line["at_s"] = self._started_at + event["finished_s"]
                    out.write(json.dumps(line) + "\n")

    def worker_on(self, node_id: str) -> int:
        ready = [e for e in self._all if e["event"] == "worker_ready" and e["node_id"] == node_id]
        return int(ready[-1]["pid"])

    def wait_told(self, timeout_s: float) -> None:
        """Until every rank of the newest Attempt has told where its state came from and what its time went into, which
        is a moment after its first step."""
        until = time.monotonic() + timeout_s
        while not (self._of_newest("restored") and self._of_newest("regroup_phases")) and time.monotonic() < until:
            time.sleep(_LOOK_S)
            self.look()

    def tiers(self) -> dict[str, int]:
        return dict(self._of_newest("restored").get("tiers", {}))

    def phases(self) -> dict[str, float]:
        told = self._of_newest("regroup_phases")
        return {key: value for key, value in told.items() if key.endswith("_s") and key != "t_s"}

    def _of_newest(self, name: str) -> dict[str, Any]:
        """That event of the newest Attempt, empty while there is none."""
        newest = max((event["attempt"] for event in self._all if event["event"] == "attempt_started"), default=0)
        return next((e for e in self._all if e["event"] == name and e["attempt"] == newest), {})


def _train_mlp(session: Session) -> None:
    from tests.bench.peers.models import make_mlp, mlp_batch

    model = session.build(make_model=make_mlp).model
    for step in session.steps():
        for leaf in step.leaves():
            step.backward(leaf, model(mlp_batch(step.number, leaf.index)).square().mean())
        step.apply()
        session.step_end(step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--model", choices=["llama", "mlp"], required=True)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    from orchestrator.load_config import load_config
    from orchestrator.options import DriverOptions
    from orchestrator.trainer import ElasticTrainer

    scratch: Path = options.scratch
    wishes = [f"run.url={scratch / 'run'}", f"run.steps={_MOST_STEPS}", "checkpoint.memory.mode=on"]
    wishes += ["checkpoint.memory.every_steps=1", *options.overrides]
    config = load_config(RUN_CONFIG, wishes)
    trainer = ElasticTrainer(
        _train_mlp if options.model == "mlp" else None,
        config=config,
        options=DriverOptions(
            ray_address=options.address, events_path=scratch / "events.jsonl", json_output=True, show_progress=False
        ),
    )
    sys.exit(trainer.fit().exit_code)


if __name__ == "__main__":
    main()
