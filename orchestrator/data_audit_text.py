"""The verdict of an audit of the data, for people and as JSON. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from orchestrator.audit_places import Finding
from orchestrator.audit_rows import SourceEpochs
from orchestrator.data_audit import AuditReport, OrderPart

__all__ = ["audit_facts", "audit_text"]

_MAX_FINDINGS = 20
_MAX_PARTIAL = 4
_MAX_CHANGES = 8


def audit_facts(report: AuditReport, rolled_back: int | None) -> dict[str, Any]:
    """As JSON. ``rolled_back`` None: no events were there to tell."""
    facts = asdict(report) | {
        "skipped": [window.model_dump() for window in report.skipped],
        "worlds": {str(size): steps for size, steps in report.worlds.items()},
        "rolled_back": rolled_back,
    }
    return {"is_proven": report.is_proven} | facts


def audit_text(report: AuditReport, rolled_back: int | None) -> str:
    """Several lines; the last one is the verdict."""
    rows = [
        ("steps", f"{report.first_step} to {report.last_step}" if report.samples else "none yet"),
        ("samples", f"{report.samples:,} in batches of {', '.join(map(str, report.batches)) or '-'}"),
        *(("epochs", line) for part in report.parts for line in _epochs(part, is_only=len(report.parts) == 1)),
        ("missing", f"{report.missing:,}"),
        ("repeated", f"{report.repeated:,}"),
        ("skipped", _skipped(report)),
        ("attempts", _attempts(report)),
        ("world sizes", _worlds(report)),
        ("chains", f"{report.num_chains} on the way are those of the samples"),
        ("done twice", _twice(rolled_back)),
        *(("note", note) for note in _notes(report)),
    ]
    lines = [f"{name:<12} {text}" for name, text in rows]
    return "\n".join([*lines, "", *_findings(report.findings), _verdict(report)])


def _epochs(part: OrderPart, *, is_only: bool) -> list[str]:
    where = "" if is_only else f", steps {part.first_step} to {part.last_step} (seed {part.seed})"
    return [f"{_of_source(source)}{where}" for source in part.sources]


def _of_source(source: SourceEpochs) -> str:
    shown = [f"{seen:,} in epoch {epoch}" for epoch, seen in list(source.partial.items())[:_MAX_PARTIAL]]
    more = f" and {len(source.partial) - _MAX_PARTIAL} more" if len(source.partial) > _MAX_PARTIAL else ""
    rest = f", and {', '.join(shown)}{more}" if shown else ""
    return f"{source.name}: {source.whole:,} whole, each of {source.num_rows:,} rows once{rest}"


def _skipped(report: AuditReport) -> str:
    if not report.num_skipped:
        return "0"
    shown = [
        f"{one.left_out} from place {one.place} ({one.why or 'no reason recorded'}"
        f"{'' if one.step is None else f' at step {one.step}'})"
        for one in report.skipped
    ]
    return f"{report.num_skipped:,} on purpose: {', '.join(shown)}"


def _attempts(report: AuditReport) -> str:
    if not report.lives:
        return "not recorded"
    numbers = f"attempts {report.attempts[0]} to {report.attempts[1]}"
    where = numbers if report.runs == 1 else f"{report.runs} runs, of which the newest has {numbers}"
    return f"{report.lives} have steps in this history, of {where}"


def _worlds(report: AuditReport) -> str:
    if not report.worlds:
        return "not recorded"
    shown = [f"{' or '.join(map(str, sizes))} from step {step}" for step, sizes in report.course[:_MAX_CHANGES]]
    more = len(report.course) - len(shown)
    totals = ", ".join(f"{steps:,} steps at {size}" for size, steps in report.worlds.items())
    return f"{', '.join(shown)}{f' and {more} more changes' if more else ''}; in all {totals}"


def _twice(rolled_back: int | None) -> str:
    if rolled_back is None:
        return "not known: there are no events"
    return f"{rolled_back:,} steps were trained and rolled back (by the events), and are no part of this history"


def _notes(report: AuditReport) -> list[str]:
    notes = []
    if report.assumed_steps:
        notes.append(
            f"steps 1 to {report.assumed_steps} were saved by a release that kept no ledger; their chain is that of "
            "equal batches in order"
        )
    if report.first_step > 1:
        notes.append(
            f"not recorded before step {report.first_step}: {report.unrecorded:,} samples of which nothing is proven"
        )
    notes += [
        f"the data was changed on purpose before step {part.first_step}: epochs are counted anew from there"
        for part in report.parts[1:]
    ]
    return notes


def _findings(findings: tuple[Finding, ...]) -> list[str]:
    lines = [f"{_where(found)}: {found.text}" for found in findings[:_MAX_FINDINGS]]
    if len(findings) > _MAX_FINDINGS:
        lines.append(f"and {len(findings) - _MAX_FINDINGS} more")
    return lines


def _where(found: Finding) -> str:
    if found.first_step == found.last_step:
        return f"step {found.first_step}"
    return f"steps {found.first_step} to {found.last_step}"


def _verdict(report: AuditReport) -> str:
    if report.is_proven:
        return "proven: each sample once an epoch, in order, as the ranks put them through backward"
    return f"NOT PROVEN: the first that is not right is {_where(report.findings[0])}"
