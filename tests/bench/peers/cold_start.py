"""Everything dead but the object store: a new cluster and a new driver, seconds to the first new step, by part.

The S3 server lives on; the first cluster with its driver, its nodes' memory and its disks is gone.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.driver_child import driver_command
from orchestrator.local_cluster import LocalCluster
from tests.bench.peers.leftovers import remove_arenas
from tests.bench.peers.models import RUN_CONFIG
from tests.bench.s3_server import swift_bucket

__all__ = ["ColdStart", "measure"]

_FIRST_S = 300.0
_SECOND_S = 300.0
_LOOK_S = 0.05


@dataclass(frozen=True, kw_only=True)
class ColdStart:
    """``seconds`` from nothing to the end of the first new step, and the parts it consists of, in their order."""

    seconds: float
    lost_steps: int
    parts: dict[str, float]


def measure(*, kill_at: int) -> ColdStart:
    """One run on four local nodes up to ``kill_at``, the end of everything, and the first step after it."""
    with tempfile.TemporaryDirectory(prefix="raysume-cold-") as scratch, swift_bucket(Path(scratch)):
        first = _life(Path(scratch), "first", until=kill_at, limit_s=_FIRST_S)
        began = time.time()
        second = _life(Path(scratch), "second", until=None, limit_s=_SECOND_S)
    newest = max(event["step"] for event in first if event["event"] == "step")
    times = {name: _at(second, name) - began for name in ("driver_started", "worker_ready", "attempt_started")}
    step = next(event for event in second if event["event"] == "step")
    ended = _start(second) + step["finished_s"] - began
    marks = {"cluster and driver": times["driver_started"], "workers": times["attempt_started"], "first step": ended}
    restored = next(event for event in second if event["event"] == "restored")
    assert set(restored["tiers"]) == {"object-storage"}
    load = _start(second) + restored["t_s"] - began
    parts = {
        "cluster and driver": marks["cluster and driver"],
        "workers warm": marks["workers"] - marks["cluster and driver"],
        "form and load": load - marks["workers"],
        "first step": ended - load,
    }
    return ColdStart(seconds=ended, lost_steps=newest - step["step"] + 1, parts=parts)


def _life(scratch: Path, name: str, *, until: int | None, limit_s: float) -> list[dict[str, Any]]:
    """Events of one driver on a cluster of its own, up to step ``until`` or its first; then all of it is killed."""
    events = scratch / f"{name}.jsonl"
    cluster = LocalCluster(node_resources={"CPU": 1})
    driver: subprocess.Popen[bytes] | None = None
    try:
        for _ in range(4):
            cluster.add_node()
        wishes = ("run.url=s3://bench/cold", "run.steps=10000")
        command = driver_command(RUN_CONFIG, wishes, ray_address=cluster.address, events_path=events, json_output=True)
        with (scratch / f"{name}.log").open("wb") as log:
            driver = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
        deadline = time.monotonic() + limit_s
        while True:
            found = _own(_read(events), is_new=until is not None)
            steps = [event["step"] for event in found if event["event"] == "step"]
            if steps and (steps[-1] >= until if until is not None else _has_told_where_from(found)):
                return found
            if time.monotonic() > deadline or driver.poll() is not None:
                raise TimeoutError(f"{name} life: see {scratch / f'{name}.log'}")
            time.sleep(_LOOK_S)
    finally:
        if driver is not None:
            driver.kill()
            driver.wait(timeout=30)
        for number in list(cluster.nodes):
            cluster.bury(cluster.kill_node(number))
        cluster.close()
        remove_arenas(cluster.started_node_ids)


def _own(events: list[dict[str, Any]], *, is_new: bool) -> list[dict[str, Any]]:
    """Those of this driver: one that goes on begins with the events of the run that it found in the store."""
    starts = [at for at, event in enumerate(events) if event["event"] == "run_started" and event["is_new"] is is_new]
    return events[starts[-1] :] if starts else []


def _has_told_where_from(events: list[dict[str, Any]]) -> bool:
    """Heartbeats tell it, which may come after the first step."""
    return any(event["event"] == "restored" for event in events)


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _start(events: list[dict[str, Any]]) -> float:
    return float(next(event["start_unix_s"] for event in events if event["event"] == "run_started"))


def _at(events: list[dict[str, Any]], name: str) -> float:
    """Unix time of the first event of this name."""
    return _start(events) + float(next(event["t_s"] for event in events if event["event"] == name))
