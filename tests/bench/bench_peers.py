"""Recovery beside the peers: Ray Train V2 (as it comes, and tuned), torchft and ours; same models, cluster and kills.

Every kill falls on a seeded moment of a step. Contestants take turns, so that a slow minute of the machine hits all.
Prints a table of median and worst, writes JSON and a plot. For an idle machine: `make bench-recovery`; with five kills
of everything it takes about forty minutes, most of them Ray Train's.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.peers import cold_start, ray_train, raysume, torchft_mlp
from tests.bench.peers.steps import Kill

ROOT = Path(__file__).resolve().parent.parent.parent
KILL_AT = 23
"""The last save (every 10 steps) is three steps old by then, and so is what a restart from it has to do again."""

Run = Callable[[int], Kill]  # given the seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """One row of the table: what breaks, for whom, and how often at most (Ray Train takes minutes each time)."""

    fault: str
    model: str
    contestant: str
    run: Run


def contests() -> list[Contest]:
    """Everything that is compared."""

    def ours(fault: Any, model: Any) -> Run:
        return lambda seed: raysume.measure(fault, model=model, kill_at=KILL_AT, seed=seed)

    def theirs(fault: Any, model: Any, *, tuned: bool) -> Run:
        return lambda seed: ray_train.measure(fault, model=model, tuned=tuned, kill_at=KILL_AT, seed=seed)

    row = partial(Contest)
    return [
        row(fault="node SIGKILL", model="llama", contestant="ours", run=ours("kill-node", "llama")),
        row(
            fault="node SIGKILL",
            model="llama",
            contestant="Ray Train tuned",
            run=theirs("kill-node", "llama", tuned=True),
        ),
        row(fault="node SIGKILL", model="llama", contestant="Ray Train", run=theirs("kill-node", "llama", tuned=False)),
        row(fault="node SIGKILL", model="mlp", contestant="ours", run=ours("kill-node", "mlp")),
        row(
            fault="node SIGKILL",
            model="mlp",
            contestant="torchft",
            run=lambda seed: torchft_mlp.measure(replicas=4, kill_at=KILL_AT, seed=seed),
        ),
        row(fault="worker SIGKILL", model="llama", contestant="ours", run=ours("kill-worker", "llama")),
        row(
            fault="worker SIGKILL",
            model="llama",
            contestant="Ray Train",
            run=theirs("kill-worker", "llama", tuned=False),
        ),
    ]


def summary(kills: Sequence[Kill]) -> dict[str, Any]:
    """Median and worst over the kills, with everything that was measured."""
    seconds = [kill.seconds for kill in kills]
    steps = [kill.step_s for kill in kills]
    return {
        "median_s": statistics.median(seconds),
        "worst_s": max(seconds),
        "median_step_s": statistics.median(steps),
        "beyond_a_step_s": statistics.median(seconds) - statistics.median(steps),
        "lost_steps": [kill.lost_steps for kill in kills],
        "kills": [asdict(kill) for kill in kills],
    }


def print_table(results: Mapping[tuple[str, str, str], Sequence[Kill]]) -> None:
    """One line a contest; the ratio is to ours of the same fault and model."""
    head = ("fault", "model", "contestant", "kills", "median", "worst", "a step", "lost steps", "ours is")
    rows = [head]
    for (fault, model, contestant), kills in results.items():
        if not kills:
            continue
        found = summary(kills)
        own = results.get((fault, model, "ours")) or ()
        times = found["median_s"] / summary(own)["median_s"] if own and contestant != "ours" else None
        rows.append(
            (
                *(fault, model, contestant, str(len(kills))),
                *(f"{found['median_s']:.2f} s", f"{found['worst_s']:.2f} s", f"{found['median_step_s']:.2f} s"),
                "-".join(str(n) for n in sorted({min(found["lost_steps"]), max(found["lost_steps"])})),
                "" if times is None else f"{times:.1f} x as fast",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def plot(results: Mapping[tuple[str, str, str], Sequence[Kill]], path: Path) -> None:
    """Every kill as a point on a logarithmic axis of seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [(key, kills) for key, kills in results.items() if kills]
    figure, axes = pyplot.subplots(figsize=(9, 0.6 * len(shown) + 1.5))
    for place, ((_, _, contestant), kills) in enumerate(shown):
        colour = "tab:blue" if contestant == "ours" else "tab:orange"
        axes.scatter([kill.seconds for kill in kills], [place] * len(kills), color=colour)
    axes.set_yticks(range(len(shown)), [", ".join(key) for key, _ in shown])
    axes.set_xscale("log")
    axes.set_xlabel("seconds from the kill to the end of the first new step")
    axes.grid(axis="x", which="both", alpha=0.3)
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def write(
    path: Path,
    results: Mapping[tuple[str, str, str], Sequence[Kill]],
    failures: Sequence[str],
    cold: cold_start.ColdStart | None,
) -> None:
    """All that was measured so far, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"name": key, **summary(kills)} for key, kills in results.items() if kills]
    path.write_text(
        json.dumps({"rows": rows, "failures": failures, "everything_dead": cold and asdict(cold)}, indent=1)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=5, help="kills of each contestant (default 5)")
    parser.add_argument("--only", default="", help="contests whose name holds this, e.g. ours or mlp")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/bench/recovery.json")
    options = parser.parse_args()
    logging.getLogger().setLevel(logging.WARNING)
    chosen = [c for c in contests() if options.only in f"{c.fault} {c.model} {c.contestant}"]
    results: dict[tuple[str, str, str], list[Kill]] = {(c.fault, c.model, c.contestant): [] for c in chosen}
    failures: list[str] = []
    for number in range(options.kills):
        for contest in chosen:
            name = (contest.fault, contest.model, contest.contestant)
            began = time.monotonic()
            try:
                kill = contest.run(options.seed + number)
            except TimeoutError as error:
                failures.append(f"{', '.join(name)}, kill {number}: {error}")
                print(failures[-1], flush=True)
                continue
            results[name].append(kill)
            detail = f"{kill.seconds:7.2f} s, {kill.lost_steps} steps lost"
            more = f", {kill.tiers} {kill.phases}" if isinstance(kill, raysume.Recovery) else ""
            print(f"{', '.join(name):45} {detail}{more} (took {time.monotonic() - began:.0f} s)", flush=True)
        write(options.out, results, failures, None)  # an hour's work is not to hang on its last row
    cold = cold_start.measure(kill_at=KILL_AT) if "everything dead".find(options.only) >= 0 else None
    print()
    print_table(results)
    if cold is not None:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in cold.parts.items())
        print(f"\neverything dead, object storage alone: {cold.seconds:.1f} s to the first new step ({parts})")
    write(options.out, results, failures, cold)
    plot(results, options.out.with_suffix(".png"))
    print(f"\nwritten to {options.out} and {options.out.with_suffix('.png').name}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
