"""How long a node loss holds a run up: several runs of the shipped local configuration, one SIGKILLed node in each.

Prints one line a run and the median and worst of each phase, and writes them as JSON. Peers join this table later;
until then the only column is ours. For an idle machine: `make bench-recovery`, or with ``--kills`` and ``--workers``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PHASES = ("detect", "regroup", "first step", "all")


def one_run(url: Path, *, workers: int, kill_at: int, config: Path) -> dict[str, float]:
    """Seconds of each phase after the kill at step ``kill_at``, and the steps that had to be run again."""
    command = [
        *(sys.executable, "-m", "orchestrator", "run", str(config), f"run.url={url}", f"run.steps={kill_at + 10}"),
        *("--local-nodes", str(workers), "--chaos", f"kill-node@{kill_at}", "--json"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"a run ended with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    summary: dict[str, Any] = json.loads(done.stdout)
    after = summary["attempts"][1]
    return {
        "detect": after["detected_s"] - after["fault_s"],
        "regroup": after["regrouped_s"] - after["detected_s"],
        "first step": after["first_step_s"] - after["regrouped_s"],
        "all": after["first_step_s"] - after["fault_s"],
        "lost steps": float(after["lost_steps"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=3, help="number of runs, each with one kill (default 3)")
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
        row = one_run(url, workers=options.workers, kill_at=13 + 3 * number, config=options.config)
        print("  ".join(f"{name} {value:.2f}" for name, value in row.items()), flush=True)
        rows.append(row)
    table = {
        phase: {"median_s": statistics.median(row[phase] for row in rows), "worst_s": max(row[phase] for row in rows)}
        for phase in PHASES
    }
    print(f"\n{'node SIGKILL to first new step':32} {'median':>8} {'worst':>8}")
    for phase, values in table.items():
        print(f"{phase:32} {values['median_s']:7.2f}s {values['worst_s']:7.2f}s")
    options.out.write_text(json.dumps({"workers": options.workers, "runs": rows, "phases": table}, indent=1))
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
