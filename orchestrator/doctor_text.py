"""A Diagnosis for people and as JSON, and the commands to run next. Pure: it reads nothing and prints nothing."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from orchestrator.doctor import Diagnosis, Examined, Finding
from orchestrator.doctor_salvage import Salvage
from orchestrator.report_text import size

__all__ = ["diagnosis_facts", "diagnosis_text", "next_commands"]

_SHOWN = 20
_SIGNS = {"damage": "DAMAGED", "warning": "warning", "note": "note"}


def diagnosis_facts(diagnosis: Diagnosis, url: str) -> dict[str, Any]:
    """Everything as JSON; ``url`` as it was typed."""
    return {
        "url": url,
        "run_id": diagnosis.run_id,
        "is_deep": diagnosis.is_deep,
        "is_damaged": diagnosis.is_damaged,
        "is_empty": diagnosis.is_empty,
        "contents": {kind: {"objects": n, "bytes": b} for kind, (n, b) in diagnosis.contents.items()},
        "foreign": list(diagnosis.foreign),
        "checkpoints": [_examined_facts(one) for one in diagnosis.examined],
        "cut_off": [
            {"step": one.key.step, "attempt": one.key.attempt.number, "bytes": one.stored_bytes, "keys": len(one.keys)}
            for one in diagnosis.inventory.cut_off
        ],
        "resume": asdict(diagnosis.outlook) | {"lost_steps": diagnosis.outlook.lost_steps},
        "salvage": None if diagnosis.salvage is None else asdict(diagnosis.salvage),
        "drivers": [
            {"key": seen.key, "is_alive": seen.is_alive, "reason": seen.reason, "what": str(seen)}
            for seen in diagnosis.drivers
        ],
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "next": next_commands(diagnosis, url),
    }


def diagnosis_text(diagnosis: Diagnosis, url: str) -> str:
    """The report for people."""
    lines = [f"{url}: {_headline(diagnosis)}"]
    lines += ["", "What is here"] if diagnosis.contents or diagnosis.foreign else []
    for kind, (number, num_bytes) in sorted(diagnosis.contents.items()):
        lines.append(f"  {kind:<14}{number:>8} {'object ' if number == 1 else 'objects'} {size(num_bytes):>10}")
    if diagnosis.foreign:
        shown = ", ".join(diagnosis.foreign[:5]) + (" ..." if len(diagnosis.foreign) > 5 else "")
        lines.append(f"  {'not ours':<14}{len(diagnosis.foreign):>8} objects: {shown}")
    lines += _checkpoint_lines(diagnosis)
    lines += _driver_lines(diagnosis)
    lines += _finding_lines(diagnosis.findings)
    lines += ["", "What a resume would do", *(f"  {line}" for line in _outlook_lines(diagnosis))]
    commands = next_commands(diagnosis, url)
    if commands:
        lines += ["", "What to run next", *(f"  {command}" for command in commands)]
    return "\n".join(lines)


def next_commands(diagnosis: Diagnosis, url: str) -> list[str]:
    """Concrete commands, the most urgent first, each with its reason."""
    commands: list[str] = []
    if any(seen.is_alive for seen in diagnosis.drivers):
        commands.append("# a driver is at work here: stop it before changing anything")
    salvage = diagnosis.salvage
    if salvage is not None:
        if salvage.is_quarantined:
            commands.append(f"raysume checkpoints quarantine {url} {salvage.step} --lift")
        commands.append(f"raysume run CONFIG run.url={url} run.resume={salvage.step}{_only_l1(salvage)}")
    if not diagnosis.is_deep and diagnosis.inventory.steps:
        commands.append(f"raysume doctor {url} --deep   # every byte; so far only presence, sizes and indexes")
    if any(one.is_damaged for one in diagnosis.examined):
        commands.append(f"raysume checkpoints copy GOOD-COPY {url} --step N   # if another copy of a lost one exists")
    if diagnosis.outlook.step is not None:
        commands.append(f"raysume run CONFIG run.url={url}   # goes on from step {diagnosis.outlook.step}")
    hopeless = [step for step in diagnosis.inventory.steps if step.standing == "void"]
    if hopeless:
        commands.append(f"raysume checkpoints prune {url} --void --dry-run   # {len(hopeless)} void checkpoints")
    if diagnosis.inventory.cut_off and diagnosis.inventory.history:
        commands.append(f"raysume checkpoints prune {url} --orphans --dry-run   # saves that were cut off")
    return commands


def _examined_facts(one: Examined) -> dict[str, Any]:
    problems = one.report.problems if one.report is not None else ()
    return {
        "step": one.step.key.step,
        "attempt": one.step.key.attempt.number,
        "standing": one.step.standing,
        "bytes": None if one.step.commit is None else one.step.commit.stored_bytes,
        "is_good": None if one.report is None else one.report.is_good,
        "problems": [{"key": one.key, "reason": one.reason, "rank": one.rank} for one in problems],
    }


def _only_l1(salvage: Salvage) -> str:
    if not salvage.lost:
        return ""
    return " run.resume_levels=L1   # L1 ONLY: weights, schedule and data position; optimizer moments start at zero"


def _headline(diagnosis: Diagnosis) -> str:
    if diagnosis.is_empty:
        return "nothing of a run is here" + (", but other files are" if diagnosis.foreign else "")
    damaged = sum(one.is_damaged for one in diagnosis.examined)
    run = f"run {diagnosis.run_id}" if diagnosis.run_id else "a run that never committed"
    if damaged:
        return f"{run}, {damaged} of {len(diagnosis.examined)} checkpoints damaged"
    return f"{run}, {'damaged records' if diagnosis.is_damaged else 'no damage found'}"


def _checkpoint_lines(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.examined and not diagnosis.inventory.cut_off:
        return []
    lines = ["", "Checkpoints, newest first" + ("" if diagnosis.is_deep else " (quick look: --deep reads every byte)")]
    for one in list(reversed(diagnosis.examined))[:_SHOWN]:
        step = one.step
        told = size(step.commit.stored_bytes) if step.commit is not None else "-"
        lines.append(f"  step {step.key.step:>8}  attempt {step.key.attempt.number:>4}  {told:>10}  {_verdict(one)}")
    if len(diagnosis.examined) > _SHOWN:
        lines.append(f"  and {len(diagnosis.examined) - _SHOWN} older ones")
    if diagnosis.inventory.cut_off:
        total = size(sum(piece.stored_bytes for piece in diagnosis.inventory.cut_off))
        steps = ", ".join(str(piece.key.step) for piece in diagnosis.inventory.cut_off[-5:])
        count = len(diagnosis.inventory.cut_off)
        were = "1 save was" if count == 1 else f"{count} saves were"
        lines.append(f"  {were} never committed ({total}), the last: step {steps}")
    return lines


def _verdict(one: Examined) -> str:
    if one.report is None:
        return one.step.standing if one.step.standing != "usable" else "not looked at"
    return "good" if one.report.is_good else f"DAMAGED: {one.report.problems[0]}"


def _driver_lines(diagnosis: Diagnosis) -> list[str]:
    return ["", "Drivers", *(f"  {seen}" for seen in diagnosis.drivers)] if diagnosis.drivers else []


def _finding_lines(findings: list[Finding]) -> list[str]:
    if not findings:
        return []
    lines = ["", "Findings"]
    for finding in findings[: 2 * _SHOWN]:
        key = "" if finding.key is None or finding.key in finding.text else f" [{finding.key}]"
        lines.append(f"  {_SIGNS[finding.severity]:<8} {finding.text}{key}")
    if len(findings) > 2 * _SHOWN:
        lines.append(f"  and {len(findings) - 2 * _SHOWN} more (--json lists all)")
    return lines


def _outlook_lines(diagnosis: Diagnosis) -> list[str]:
    outlook = diagnosis.outlook
    if outlook.refusal is not None:
        return _refusal_lines(diagnosis)
    if outlook.step is None:
        return ["start at step 0: nothing was ever committed here"]
    lines = [f"go on from step {outlook.step} (attempt {outlook.attempt})"]
    for passed in outlook.passed_over:
        lines.append(f"step {passed.step} is passed over: {passed.key}: {passed.reason}")
    if outlook.lost_steps:
        reached = max(step for step in (outlook.newest_committed, outlook.newest_trained) if step is not None)
        are = "1 step is" if outlook.lost_steps == 1 else f"{outlook.lost_steps} steps are"
        lines.append(f"{are} trained again (the run had reached step {reached})")
    else:
        lines.append("nothing that was committed is lost")
    return lines


def _refusal_lines(diagnosis: Diagnosis) -> list[str]:
    lines = ["refuse: there are checkpoints, but none can be used; it never starts anew over them"]
    salvage = diagnosis.salvage
    if salvage is None:
        return [*lines, "no checkpoint has all of L1: only a copy elsewhere can help"]
    if not salvage.lost:
        return [*lines, f"step {salvage.step} is out of use, but every tensor of it is whole: it can be lifted"]
    lost = ", ".join(salvage.lost)
    return [
        *lines,
        f"of step {salvage.step} all of L1 is whole, {lost} is not: an L1-only resume is possible, with fresh "
        "optimizer moments; expect a bump in the loss",
    ]
