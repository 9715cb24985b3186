"""`raysume drill`: one configuration run twice, once in peace and once under faults, and held to be the same run.

It starts the runs, reads their events and writes down what they show. What must hold is `orchestrator.drill_rules`'.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from orchestrator.chaos_needs import check_schedule
from orchestrator.drill_audit import audit_run
from orchestrator.drill_compare import compare
from orchestrator.drill_history import read_history
from orchestrator.drill_plot import draw
from orchestrator.drill_rules import EXACT, ROUNDED
from orchestrator.drill_runs import INTERRUPTED, UNBROKEN, DrillPlan, DrillRun, RunEnd
from orchestrator.drill_text import DrillResult, result_json, result_text
from orchestrator.errors import ConfigError
from orchestrator.event_fields import Event
from orchestrator.exit_codes import DrillCode, ExitCode
from orchestrator.progress import ProgressView, open_progress
from orchestrator.stop_signals import stop_signals
from storage.keys import EVENTS, SUMMARY

__all__ = ["RESULT", "check_plan", "choose_folder", "run_drill"]

RESULT: Final = "drill.json"
PLOT: Final = "drill.png"
_KEPT = frozenset({EVENTS, SUMMARY})
_SHOWN_LINES: Final = 30
RunOne = Callable[[DrillPlan, str, ProgressView, list[int]], RunEnd]
Audit = Callable[[Path, list[Event]], tuple[str, ...]]


def choose_folder(asked: Path | None, name: str) -> Path:
    """Where both runs go: a place where none has been. Raises ConfigError for one that is taken."""
    if asked is not None:
        if asked.exists() and any(asked.iterdir()):
            raise ConfigError(
                "--out", (f"{asked} is not empty; name a new directory, or remove what an old drill left",)
            )
        return asked.resolve()
    base = Path("outputs") / f"drill-{name}"
    folder, number = base, 1
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder.resolve()


def check_plan(plan: DrillPlan) -> None:
    """Raise ConfigError or ChaosSpecError for a drill that could not come to its end."""
    world = plan.config.world
    if world.min_workers > plan.num_workers:
        where = f"{plan.num_nodes} local nodes"
        raise ConfigError(
            "drill", (f"world.min_workers is {world.min_workers}, and {where} hold {plan.num_workers} workers",)
        )
    check_schedule(plan.actions, plan.config, plan.num_nodes)


def run_drill(
    plan: DrillPlan,
    *,
    json_output: bool = False,
    is_kept: bool = False,
    run_one: RunOne = lambda plan, name, view, stops: DrillRun(plan, name, view, stops).run(),
    audit: Audit = audit_run,
) -> int:
    """Both runs, one after the other, and the verdict on stdout. Returns the exit code of the drill."""
    check_plan(plan)
    plan.folder.mkdir(parents=True, exist_ok=True)
    ends: list[RunEnd] = []
    with stop_signals() as stops:
        for number, name in enumerate((UNBROKEN, INTERRUPTED), start=1):
            view = open_progress(total_steps=plan.config.run.steps, is_shown=not json_output)
            try:
                if number == 1:
                    view.note(f"faults of the second run: {', '.join(map(str, plan.actions))}")
                view.note(f"run {number} of 2, {name}: {plan.directory(name)}")
                ends.append(run_one(plan, name, view, stops))
            finally:
                view.close()
            if ends[-1].exit_code or stops:
                break
    if stops:
        if not is_kept:
            shutil.rmtree(plan.folder, ignore_errors=True)
        print("stopped", file=sys.stderr)
        return ExitCode.STOPPED
    failed = next((end for end in ends if end.exit_code), None)
    if failed is not None:
        _say_failure(failed, plan)
    if len(ends) < 2:
        return ends[0].exit_code
    found = audit(plan.directory(INTERRUPTED), ends[1].events)
    result = _compare(plan, *ends, audit=found)
    text = json.dumps(result_json(result), indent=1)
    (plan.folder / RESULT).write_text(text + "\n")
    print(text if json_output else result_text(result), flush=True)
    if result.is_same and not is_kept:
        _clear(plan)
    if failed is not None:
        return failed.exit_code
    return ExitCode.SUCCESS if result.is_same else DrillCode.NOT_THE_SAME


def _compare(plan: DrillPlan, unbroken: RunEnd, interrupted: RunEnd, *, audit: tuple[str, ...]) -> DrillResult:
    histories = read_history(unbroken.events), read_history(interrupted.events)
    comparison = compare(
        *histories,
        rules=EXACT if plan.config.reproducible else ROUNDED,
        num_steps=plan.config.run.steps,
        planned=plan.actions,
        undone=interrupted.undone,
    )
    return DrillResult(
        name=plan.config.run.name,
        reproducible=bool(plan.config.reproducible),
        faults=tuple(map(str, plan.actions)),
        unbroken=histories[0],
        interrupted=histories[1],
        comparison=comparison,
        exit_codes={end.name: end.exit_code for end in (unbroken, interrupted)},
        seconds={end.name: end.seconds for end in (unbroken, interrupted)},
        audit=audit,
        plot=draw(plan.folder / PLOT, *histories, comparison),
        folder=str(plan.folder),
    )


def _say_failure(end: RunEnd, plan: DrillPlan) -> None:
    print(*end.lines[-_SHOWN_LINES:], sep="\n", file=sys.stderr)
    reason = (read_history(end.events).exit_reason or "").partition("\n")[0]
    text = f"error: the {end.name} run ended with exit code {end.exit_code}{f': {reason}' if reason else ''}"
    print(f"{text}; its files are in {plan.directory(end.name)}", file=sys.stderr, flush=True)


def _clear(plan: DrillPlan) -> None:
    """Checkpoints of a drill that was passed are of no use: what they proved is written down."""
    for name in (UNBROKEN, INTERRUPTED):
        for entry in plan.directory(name).iterdir():
            if entry.name in _KEPT:
                continue
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
