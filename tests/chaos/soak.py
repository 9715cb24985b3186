"""Strikes one run with many faults, each as soon as it has recovered from the last, and holds it to its invariants.

`python -m tests.chaos.soak --faults 200 --seed 7`, or `make soak`. Exit code 1 names what did not hold and where the
events are. A seed gives the same schedule again; which node a fault hits depends on which live then.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.chaos import ChaosVerb
from orchestrator.chaos_deeds import remove_leftovers
from orchestrator.load_config import load_config
from orchestrator.local_cluster import prepare_environment
from orchestrator.supervisor_plan import SupervisorPlan
from storage.events import read_events
from storage.keys import SUMMARY
from tests.chaos.soak_drill import NUM_NODES, Drill, SoakBroken, Struck
from tests.chaos.soak_invariants import Violation, check_growth, check_history, check_losses, check_nothing_left
from tests.chaos.soak_plan import STEPS_PER_FAULT, WEIGHTS, Strike, draw_strikes
from tests.runs import Run, RunResult, make_run, write_rows

_S_PER_FAULT = 10.0
_END_S_PER_STEP = 1.0
_SETTINGS: dict[str, dict[str, Any]] = {
    "world": {
        "min_workers": 1,
        "max_workers": NUM_NODES,
        "start_grace_s": 60.0,
        "join_gain_ratio": 0.0,
        "join_window_s": 1.0,
    },
    # A smaller rate than the other chaos tests': over thousands of steps rounding must not grow.
    "optim": {"lr": 0.0005, "warmup_steps": 10},
    "checkpoint": {
        "every_steps": 8,
        "memory": {"mode": "on", "every_steps": 1},
        "local_disk": {"mode": "on", "keep_free_bytes": 0},
    },
    # What stops a run whose own code or nodes are at fault would take this schedule for that.
    "failure": {
        "max_user_errors": -1,
        "max_node_failures": None,
        "max_same_step_failures": None,
        "silent_s": 5.0,
        "group_timeout_s": 20.0,
    },
}


@dataclass(slots=True, kw_only=True)
class Report:
    """What a soak found, as it is written to JSON."""

    seed: int
    num_faults: int
    num_steps: int
    strikes: list[dict[str, Any]] = field(default_factory=list)
    recovery_s: dict[str, dict[str, float]] = field(default_factory=dict)
    growths: list[str] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    shm_mb: list[float] = field(default_factory=list)
    loss_apart: float | None = None
    violations: list[Violation] = field(default_factory=list)
    wall_s: float = 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    num_faults = options.faults
    if options.minutes is not None:
        num_faults = max(1, min(num_faults, int(options.minutes * 60 / _S_PER_FAULT)))
    strikes = draw_strikes(options.seed, num_faults, options.verbs)
    if options.show:
        print(*(f"{s.number:4} {s} after {s.gap_steps} steps" for s in strikes), sep="\n")
        return 0
    folder = Path(options.keep or tempfile.mkdtemp(prefix="raysume-soak-"))
    begun_s = time.monotonic()
    report = Report(seed=options.seed, num_faults=num_faults, num_steps=STEPS_PER_FAULT * (num_faults + 2))
    _soak(folder, report, strikes, None if options.minutes is None else begun_s + options.minutes * 60)
    report.wall_s = time.monotonic() - begun_s
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(report), indent=1))
    _print_table(report)
    if report.violations:
        print(f"\nseed {report.seed}: these did not hold; the events are kept in {folder}")
        print(*(f"  {name}: {detail}" for name, detail in report.violations), sep="\n")
        return 1
    if options.keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--minutes", type=float, help=f"fewer faults where so many do not fit, at {_S_PER_FAULT:g} s each"
    )
    parser.add_argument("--json", type=Path, help="write what was found there")
    parser.add_argument("--keep", help="put everything into this folder, and leave it there")
    parser.add_argument("--verbs", type=lambda text: [ChaosVerb(v) for v in text.split(",")], default=list(WEIGHTS))
    parser.add_argument("--show", action="store_true", help="only print the schedule")
    return parser.parse_args(arguments)


def _soak(folder: Path, report: Report, strikes: Sequence[Strike], until_s: float | None) -> None:
    """Everything between the first process and the last invariant; fills in ``report``."""
    write_rows(str(folder / "rows"))
    run, plan = _make(folder, "soaked", report.num_steps, _SETTINGS)
    prepare_environment()
    disk = plan.config.checkpoint.local_disk
    drill = Drill(plan, folder, seed=report.seed, say=_say)
    try:
        with drill:
            try:
                _strike_all(drill, report, strikes, until_s)
            except SoakBroken as broken:
                report.violations.append((str(broken.args[0]), str(broken.args[1])))
        report.violations += check_nothing_left(frozenset(drill.processes), plan.run_id, disk, drill.node_ids)
    finally:
        for node_id in drill.node_ids:
            remove_leftovers(disk, plan.run_id, node_id)  # what should not be there has been told
    report.samples = [asdict(sample) for sample in drill.watch.samples]
    report.shm_mb = drill.watch.shm_mb
    report.growths = [str(growth) for growth in drill.watch.growths()]
    report.recovery_s = _percentiles(drill.struck)
    report.violations += check_growth(drill.watch.growths())
    if drill.exit_code != 0:
        return
    result = _result(run, drill)
    report.violations += check_history(result, report.num_steps)
    _say("the same steps on one worker, with no fault")
    unbroken, _ = _make(folder, "unbroken", report.num_steps, {"optim": _SETTINGS["optim"]})
    violations, report.loss_apart = check_losses(result, unbroken, report.num_steps)
    report.violations += violations


def _strike_all(drill: Drill, report: Report, strikes: Sequence[Strike], until_s: float | None) -> None:
    drill.begin()
    for strike in strikes:
        if until_s is not None and time.monotonic() > until_s:
            _say(f"time is over after {len(drill.struck)} of {len(strikes)} strikes")
            break
        struck = drill.strike(strike)
        report.strikes.append(_row(struck))
        _say(_line(struck, len(strikes)))
    drill.end(60.0 + report.num_steps * _END_S_PER_STEP)


def _make(folder: Path, name: str, steps: int, settings: dict[str, dict[str, Any]]) -> tuple[Run, SupervisorPlan]:
    run = make_run(folder / name, str(folder / "rows"), steps=steps, every_steps=100, settings=settings)
    plan = SupervisorPlan(
        config=load_config(run.config_path, []),
        config_path=run.config_path,
        overrides=(),
        num_nodes=NUM_NODES,
        actions=(),
        events_path=run.events_path,
        run_id=run.run_id,
    )
    return run, plan


def _result(run: Run, drill: Drill) -> RunResult:
    return RunResult(
        run=run,
        exit_code=0,
        summary=json.loads((run.directory / SUMMARY).read_text()),
        events=read_events(run.events_path),
        stderr=drill.last_words(),
        processes=frozenset(drill.processes),
    )


# -- what is said -----------------------------------------------------------------------------------------------------


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def _line(struck: Struck, num_strikes: int) -> str:
    outcome = struck.outcome
    said = f"{struck.strike.number:3}/{num_strikes} {struck.strike!s:36} step {outcome.step:5}"
    if outcome.is_idle:
        said += "  without effect"
    elif outcome.tier is None:
        said += f"  no Attempt broke, next step after {outcome.recovery_s:.2f} s"
    else:
        said += f"  new step after {outcome.recovery_s:5.2f} s from {outcome.tier}, {outcome.lost_steps} lost"
    causes = f" ({', '.join(outcome.causes)})" if outcome.causes else ""
    return "; ".join([said + causes, *(f"did NOT happen: {why}" for why in struck.refused)])


def _row(struck: Struck) -> dict[str, Any]:
    return {"strike": str(struck.strike), "number": struck.strike.number, "refused": struck.refused} | asdict(
        struck.outcome
    )


def _percentiles(struck: Sequence[Struck]) -> dict[str, dict[str, float]]:
    """Recovery of each kind of strike, those left out that had no effect or were refused."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for one in struck:
        if not one.outcome.is_idle and not one.refused:
            by_name[str(one.strike)].append(one.outcome.recovery_s)
            if len(one.strike.verbs) == 1 and one.strike.phase is not None:
                by_name[one.strike.verbs[0]].append(one.outcome.recovery_s)
    table = {}
    for name, values in sorted(by_name.items()):
        ordered = sorted(values)
        table[name] = {
            "num": len(ordered),
            "p50": statistics.median(ordered),
            "p90": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
            "max": ordered[-1],
        }
    return table


def _print_table(report: Report) -> None:
    print(f"\n{'strike':40} {'num':>4} {'p50':>7} {'p90':>7} {'max':>7}")
    for name, row in report.recovery_s.items():
        print(f"{name:40} {row['num']:4} {row['p50']:6.2f}s {row['p90']:6.2f}s {row['max']:6.2f}s")
    lost = [int(row["lost_steps"]) for row in report.strikes]
    num_struck = sum(row["strike"].count("+") + 1 - len(row["refused"]) for row in report.strikes)
    apart = "not compared" if report.loss_apart is None else f"{report.loss_apart:.1e} apart at most"
    print(
        f"\n{num_struck} faults in {report.wall_s:.0f} s; {sum(lost)} steps lost, at most {max(lost, default=0)} each"
    )
    print(f"losses: {apart}; seed {report.seed}, {report.num_steps} steps")
    # Those of single processes are in the JSON.
    print(*(line for line in report.growths if not re.match(r"\w+ \d+:", line)), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
