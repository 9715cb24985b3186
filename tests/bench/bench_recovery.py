"""How long a fault holds a run up, and what that time goes into: several runs of the shipped local configuration with
one SIGKILL or SIGSTOP in each.

Prints one line a run and the median and worst of each phase, and writes them as JSON. For the figures beside the peers'
see `bench_peers`. For an idle machine: `make bench-recovery`, or with ``--fault``, ``--kills`` and ``--workers``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from storage.events import read_events
from storage.keys import EVENTS

ROOT = Path(__file__).resolve().parent.parent.parent
FAULTS = ("kill-node", "kill-worker", "stop-worker")
PHASES = {
    "detect": "fault until the driver sees the first sign of it",
    "fence": "until it knows who lives, and the survivors have let the old World go",
    "plan": "until the next World and its restore are chosen and journalled",
    "form": "the ranks find each other",
    "build": "model and optimizer",
    "load": "restore",
    "first step": "the first optimizer step",
    "rest": "calls between driver and workers",
    "all": "fault until the end of the first new step",
    "pause": "the same without that step",
}


def one_run(url: Path, *, workers: int, fault: str, at_step: int, config: Path) -> dict[str, float]:
    """Seconds of each phase after the fault at ``at_step``, and the steps that had to be run again."""
    command = [
        *(sys.executable, "-m", "orchestrator", "run", str(config), f"run.url={url}", f"run.steps={at_step + 10}"),
        *("--local-nodes", str(workers), "--chaos", f"{fault}@{at_step}", "--json"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"a run ended with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    return phases_of(json.loads(done.stdout)["attempts"][1], read_events(url / EVENTS))


def phases_of(after: dict[str, Any], events: list[dict[str, Any]]) -> dict[str, float]:
    """``after``: the summary's line of the Attempt that follows the fault."""

    def of(name: str, attempt: int) -> dict[str, Any]:
        return next(event for event in events if event["event"] == name and event["attempt"] == attempt)

    number = int(after["attempt"])
    fenced_s, planned_s = of("fault", number - 1)["t_s"], of("attempt_started", number)["t_s"]
    ranks, step = of("regroup_phases", number), of("step", number)
    row = {
        "detect": after["detected_s"] - after["fault_s"],
        "fence": fenced_s - after["detected_s"],
        "plan": planned_s - fenced_s,
        "form": ranks["form_s"],
        "build": ranks["build_s"],
        "load": ranks["load_s"],
        "first step": step["step_s"],
        "all": after["first_step_s"] - after["fault_s"],
    }
    row["rest"] = row["all"] - sum(seconds for name, seconds in row.items() if name != "all")
    row["pause"] = row["all"] - row["first step"]
    return {name: row[name] for name in PHASES} | {"lost steps": float(after["lost_steps"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=FAULTS, default="kill-node")
    parser.add_argument("--kills", type=int, default=3, help="number of runs, each with one fault (default 3)")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--config", type=Path, default=ROOT / "clusters/local/run.yaml")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/bench/recovery.json")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(options.kills):
        url = options.out.parent / f"recovery-run-{number}"
        subprocess.run(["rm", "-rf", str(url)], check=True)
        # At different distances from the last save (every 10 steps), so that lost work is not flattered.
        at_step = 13 + 3 * number
        row = one_run(url, workers=options.workers, fault=options.fault, at_step=at_step, config=options.config)
        print("  ".join(f"{name} {value:.2f}" for name, value in row.items()), flush=True)
        rows.append(row)
    table = {
        phase: {"median_s": statistics.median(row[phase] for row in rows), "worst_s": max(row[phase] for row in rows)}
        for phase in PHASES
    }
    print(f"\n{options.fault + ' to first new step':28} {'median':>8} {'worst':>8}")
    for phase, values in table.items():
        print(f"{phase:28} {values['median_s']:7.2f}s {values['worst_s']:7.2f}s  {PHASES[phase]}")
    result = {"fault": options.fault, "workers": options.workers, "runs": rows, "phases": table}
    options.out.write_text(json.dumps(result, indent=1))
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
