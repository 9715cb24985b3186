"""Holds priors of the failure rate against traces of real clusters: which one serves both spot and owned machines?

Reads the traces from a directory that is given: Bamboo's ``bamboo-p3.csv``, ``bamboo-g4dn.csv`` and
``gcp-a100-east1b.txt`` (uclasystem/bamboo, MIT), InfiniteHBD's ``infinitehbd-faults.json``
(stepfun-ai/InfiniteHBD-Trace, Apache-2.0). The estimate is `orchestrator.hazard.node_rate`, the one that runs use.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import groupby, product
from pathlib import Path

from orchestrator.hazard import node_rate
from orchestrator.save_config import HazardConfig
from orchestrator.save_facts import ClusterFacts

_HOUR_S = 3600.0
_SERVERS = 400
_STARTS = 16  # a run begins at each of the first three quarters of so many places of a trace
_LONGEST = 20  # failures of one run that are looked at

Change = tuple[float, int]
"""At these seconds so many nodes came, or went where negative."""


def bamboo_events(path: Path) -> list[Change]:
    with path.open(newline="") as file:
        return [(float(row[0]) / 1000.0, 1 if row[1] == "add" else -1) for row in csv.reader(file)]


def pool_sizes(path: Path) -> list[Change]:
    with path.open(newline="") as file:
        rows = [(datetime.fromisoformat(f"{day.strip()} {at.strip()}"), int(n)) for day, at, n in csv.reader(file)]
    sizes = [0, *(size for _, size in rows)]
    return [((at - rows[0][0]).total_seconds(), size - sizes[i]) for i, (at, size) in enumerate(rows)]


def server_faults(path: Path, servers: Sequence[str] | None = None) -> list[Change]:
    """``servers``: a part of the cluster; others are left out. A server that is down already does not fail again."""
    rows = sorted(json.loads(path.read_text()), key=lambda row: float(row["event_time"]))
    changes: list[Change] = [(0.0, _SERVERS if servers is None else len(servers))]
    down: set[str] = set()
    for row in rows:
        server, is_fault = row["node_id"], row["event_type"] == "fault_start"
        if (servers is None or server in servers) and is_fault != (server in down):
            down ^= {server}
            changes.append((float(row["event_time"]) * 86_400.0, -1 if is_fault else 1))
    return changes


def waits(changes: Iterable[Change], begin_s: float) -> list[float]:
    """Node-seconds from one break of the World to the next, from ``begin_s`` on. What goes at once is one break."""
    found: list[float] = []
    num_nodes, exposure, before_s = 0, 0.0, 0.0
    for at_s, group in groupby(sorted(changes), key=lambda change: change[0]):
        steps = [step for _, step in group]
        if at_s > begin_s:
            exposure += num_nodes * (at_s - max(before_s, begin_s))
            if min(steps) < 0 and num_nodes > 0:
                found.append(exposure)
                exposure = 0.0
        num_nodes, before_s = num_nodes + sum(steps), at_s
    return found


def runs_of(traces: Iterable[list[Change]]) -> list[list[float]]:
    runs = []
    for changes in traces:
        end_s = max(at_s for at_s, _ in changes)
        starts = (end_s * place / _STARTS for place in range(_STARTS * 3 // 4))
        runs += [found[:_LONGEST] for begin_s in starts if len(found := waits(changes, begin_s)) >= 2]
    return runs


def judge(runs: Sequence[list[float]], config: HazardConfig, last: int) -> tuple[float, float]:
    """Mean log likelihood of the waits for failures 2 to ``last``, and the mean excess of what interval and failures
    cost over what they would with the run's own mean."""
    likelihoods: list[float] = []
    excesses: list[float] = []
    for run in runs:
        truth_s, exposure = sum(run) / len(run), 0.0
        for faults, wait in enumerate(run[:last]):
            if faults >= 1:
                rate = node_rate(ClusterFacts(num_nodes=1, faults=faults, exposure_node_s=exposure), config)
                shape = config.prior_weight + faults
                scale = shape / rate
                likelihoods.append(math.log(rate) - (shape + 1.0) * math.log1p(wait / scale))
                ratio = math.sqrt(1.0 / (rate * truth_s))
                excesses.append((ratio + 1.0 / ratio) / 2.0 - 1.0)
            exposure += wait
    return sum(likelihoods) / len(likelihoods), sum(excesses) / len(excesses)


def read_traces(directory: Path, seed: int) -> dict[str, list[list[Change]]]:
    faults = directory / "infinitehbd-faults.json"
    known = sorted({row["node_id"] for row in json.loads(faults.read_text())})
    servers = known + [f"never failed {place}" for place in range(_SERVERS - len(known))]
    draw = random.Random(seed)
    return {
        "p3 spot": [bamboo_events(directory / "bamboo-p3.csv")],
        "g4dn spot": [bamboo_events(directory / "bamboo-g4dn.csv")],
        "GCP spot": [pool_sizes(directory / "gcp-a100-east1b.txt")],
        "400 owned": [server_faults(faults)],
        "64 owned": [server_faults(faults, draw.sample(servers, 64)) for _ in range(6)],
        "8 owned": [server_faults(faults, draw.sample(servers, 8)) for _ in range(40)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    traces = read_traces(given.traces, given.seed)
    for name, several in traces.items():
        found = [wait for changes in several for wait in waits(changes, -1.0)]
        print(f"{name}: {len(found)} breaks, node-hours between them {sum(found) / len(found) / _HOUR_S:.1f}")
    runs = {name: runs_of(several) for name, several in traces.items()}
    for last in (3, _LONGEST):
        print(f"\nfailures 2 to {last}: log likelihood / excess")
        print("  prior, weight   " + "  ".join(f"{name:>15}" for name in runs) + "   worst")
        for hours, weight in product((1, 6, 24, 168, 720, 5688), (0.03, 0.1, 0.3, 1.0, 3.0)):
            config = HazardConfig(prior_node_mtbf_s=hours * _HOUR_S, prior_weight=weight)
            scores = [judge(found, config, last) for found in runs.values()]
            cells = "  ".join(f"{likely:+7.2f} {excess:6.1%}" for likely, excess in scores)
            print(f"{hours:6} h, {weight:5}   {cells}   {max(excess for _, excess in scores):.0%}")


if __name__ == "__main__":
    main()
