"""`doctor`: walks a Run's place and says what is there, what is damaged, and what a resume would do. Changes nothing.

What a resume would use is not guessed: the very planner of a resume is asked, over a store that keeps its writes to
itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.doctor_salvage import Salvage, find_salvage
from storage.commit_log import CommitLog
from storage.errors import CorruptCheckpoint, ObjectMissing, StorageError, StoreUnavailable
from storage.events import utc_text
from storage.inventory import Inventory, StoredStep, take_inventory
from storage.keys import (
    COMMITS,
    EVENTS,
    JOURNAL,
    LEASES,
    MANIFESTS,
    PROBES,
    QUARANTINE,
    RUN,
    SHARDS,
    SUMMARY,
    VERIFIED,
    Attempt,
    StepKey,
)
from storage.lease_watch import DriverSighting, watch_drivers
from storage.manifest import QuarantineRecord
from storage.metered_store import MeteredStore
from storage.object_store import ObjectEntry, ObjectStore
from storage.overlay_store import OverlayStore
from storage.restore import plan_restore
from storage.verify import Problem, VerifyReport, verify_commit

__all__ = ["Diagnosis", "DoctorWish", "Examined", "Finding", "PassedOver", "ResumeOutlook", "diagnose"]

Severity = Literal["damage", "warning", "note"]

_TAIL_BYTES = 256 << 10
_SKEW_S = 60.0
_FOLDERS = (COMMITS, MANIFESTS, SHARDS, QUARANTINE, VERIFIED, JOURNAL, LEASES, PROBES)
_FILES = (RUN, SUMMARY, EVENTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorWish:
    """How thoroughly to look. ``newest`` None: every usable Checkpoint is examined. ``watch_s`` bounds the watching
    of Leases."""

    deep: bool = False
    newest: int | None = None
    watch_s: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing worth saying; ``key`` names the object it is about, where it is about one."""

    severity: Severity
    text: str
    key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """One Commit, and what verifying it found; ``report`` None: it was not looked at."""

    step: StoredStep
    report: VerifyReport | None

    @property
    def is_damaged(self) -> bool:
        return self.step.standing == "unreadable" or (self.report is not None and not self.report.is_good)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """A Checkpoint that a resume would leave out, and for which object."""

    step: int
    key: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeOutlook:
    """What `raysume run` would do here. ``step`` None: start at step 0, or refuse where ``refusal`` says why.

    ``lost_steps`` counts from the newest step that was committed, or trained as far as the events say.
    """

    step: int | None
    attempt: int | None
    refusal: str | None
    passed_over: tuple[PassedOver, ...]
    newest_committed: int | None
    newest_trained: int | None

    @property
    def lost_steps(self) -> int:
        known = [step for step in (self.newest_committed, self.newest_trained) if step is not None]
        return max(0, max(known, default=0) - (self.step or 0))


@dataclass(kw_only=True)
class Diagnosis:
    """All that was seen under one URL."""

    url: str
    is_deep: bool
    contents: dict[str, tuple[int, int]]
    foreign: tuple[str, ...]
    run_id: str | None
    inventory: Inventory
    examined: list[Examined]
    outlook: ResumeOutlook
    salvage: Salvage | None
    drivers: list[DriverSighting]
    quarantined: dict[StepKey, QuarantineRecord]
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Nothing of a Run is here."""
        return not (self.inventory.steps or self.inventory.cut_off or self.run_id)

    @property
    def is_damaged(self) -> bool:
        return any(finding.severity == "damage" for finding in self.findings)


def diagnose(
    store: ObjectStore,
    wish: DoctorWish,
    *,
    now_s: Callable[[], float] = time.time,
    on_total: Callable[[int], None] = lambda _: None,
    progress: Callable[[int], None] = lambda _: None,
    on_wait: Callable[[DriverSighting, float], None] | None = None,
) -> Diagnosis:
    """Look at everything under the store's root. Raises StoreUnavailable when it cannot be read at all.

    ``on_total`` is told how many bytes will be read where that is known, ``progress`` those that were.
    """
    metered = MeteredStore(store, progress)
    log = CommitLog(metered, None)
    listing = store.list("")
    inventory = take_inventory(log)
    examined = _examine(metered, log, inventory, wish, on_total)
    outlook = _outlook(metered, inventory, examined, _last_step_in_events(store, listing))
    contents, foreign = _sorted_out(listing)
    diagnosis = Diagnosis(
        url=store.url,
        is_deep=wish.deep,
        contents=contents,
        foreign=foreign,
        run_id=_run_id(inventory),
        inventory=inventory,
        examined=examined,
        outlook=outlook,
        salvage=find_salvage(metered, log, inventory) if outlook.refusal is not None else None,
        drivers=watch_drivers(store, ttl_s=wish.watch_s, on_wait=on_wait),
        quarantined=log.quarantined(),
    )
    diagnosis.findings += _checkpoint_findings(diagnosis)
    diagnosis.findings += _record_findings(store, diagnosis, listing)
    diagnosis.findings += _clock_findings(diagnosis, now_s())
    return diagnosis


def _examine(
    store: ObjectStore, log: CommitLog, inventory: Inventory, wish: DoctorWish, on_total: Callable[[int], None]
) -> list[Examined]:
    """Verify the usable Commits, newest first; those out of use are only listed."""
    usable = [step for step in reversed(inventory.steps) if step.standing == "usable"]
    chosen = usable if wish.newest is None else usable[: wish.newest]
    on_total(sum(step.commit.stored_bytes for step in chosen if step.commit is not None) if wish.deep else 0)
    reports: dict[str, VerifyReport] = {}
    for step in chosen:
        if step.commit is not None:
            reports[step.record] = _verified(store, log, step, wish.deep)
    return [Examined(step=step, report=reports.get(step.record)) for step in inventory.steps]


def _verified(store: ObjectStore, log: CommitLog, step: StoredStep, deep: bool) -> VerifyReport:
    assert step.commit is not None
    try:
        return verify_commit(store, log, step.commit, deep=deep)
    except StoreUnavailable:
        raise
    except StorageError as error:  # whole, but not readable by this version
        problem = Problem(key=step.commit.manifest_key, reason=str(error))
        return VerifyReport(step_key=step.key, is_deep=deep, num_shards=0, bytes_read=0, problems=(problem,))


def _outlook(
    store: ObjectStore, inventory: Inventory, examined: Sequence[Examined], newest_trained: int | None
) -> ResumeOutlook:
    """Ask the planner, with what was found damaged taken out of use as its loading would do."""
    overlay = OverlayStore(store)
    log = CommitLog(overlay, None)
    passed: dict[int, PassedOver] = {}
    for one in examined:
        if one.report is not None and not one.report.is_good:
            first = one.report.problems[0]
            passed[one.step.key.step] = PassedOver(step=one.step.key.step, key=first.key, reason=first.reason)
            log.quarantine(one.step.key, first.key, first.reason, utc_text(0.0))
    for step in inventory.of("quarantined"):
        if step.quarantine is not None:
            reason = f"quarantined: {step.quarantine.reason}"
            passed[step.key.step] = PassedOver(step=step.key.step, key=step.quarantine.key, reason=reason)
    for step in inventory.of("unreadable"):
        passed[step.key.step] = PassedOver(step=step.key.step, key=step.record, reason="the commit record is damaged")
    refusal = plan = None
    try:
        plan = plan_restore(log, attempt=Attempt(number=0, nonce="0" * 8))
    except (StoreUnavailable, CorruptCheckpoint):
        raise
    except StorageError as error:
        refusal = str(error)
    steps = [step.key.step for step in inventory.steps if step.standing != "void"]
    return ResumeOutlook(
        step=None if plan is None else plan.step,
        attempt=None if plan is None else plan.source.attempt.number,
        refusal=refusal,
        passed_over=tuple(passed[step] for step in sorted(passed, reverse=True)),
        newest_committed=max(steps, default=None),
        newest_trained=newest_trained,
    )


def _sorted_out(listing: Sequence[ObjectEntry]) -> tuple[dict[str, tuple[int, int]], tuple[str, ...]]:
    """Objects and bytes of each kind of ours, and the keys of everything else."""
    contents: dict[str, tuple[int, int]] = {}
    foreign: list[str] = []
    for entry in listing:
        kind = next((folder for folder in _FOLDERS if entry.key.startswith(folder)), None)
        kind = kind or (entry.key if entry.key in _FILES else None)
        if kind is None:
            foreign.append(entry.key)
            continue
        count, size = contents.get(kind, (0, 0))
        contents[kind] = (count + 1, size + entry.size)
    return contents, tuple(foreign)


def _run_id(inventory: Inventory) -> str | None:
    commits = [step.commit for step in inventory.steps if step.commit is not None]
    return commits[-1].run_id if commits else None


def _last_step_in_events(store: ObjectStore, listing: Sequence[ObjectEntry]) -> int | None:
    """The highest step that the end of the event file speaks of; None where there is none."""
    size = next((entry.size for entry in listing if entry.key == EVENTS), 0)
    if not size:
        return None
    start = max(0, size - _TAIL_BYTES)
    try:
        lines = store.get_range(EVENTS, start, size - start).splitlines()
    except (ObjectMissing, StoreUnavailable):  # replaced by its writer meanwhile: it is only a hint
        return None
    steps = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:  # the first line is cut, the last one may be torn
            continue
        if isinstance(event, dict) and isinstance(event.get("step"), int):
            steps.append(event["step"])
    return max(steps, default=None)


def _checkpoint_findings(diagnosis: Diagnosis) -> list[Finding]:
    findings = []
    for one in diagnosis.examined:
        if one.step.standing == "unreadable":
            text = f"step {one.step.key.step}: the commit record cannot be read"
            findings.append(Finding(severity="damage", text=text, key=one.step.record))
        for problem in one.report.problems if one.report is not None else ():
            text = f"step {one.step.key.step}: {problem.reason}"
            findings.append(Finding(severity="damage", text=text, key=problem.key))
    for step in diagnosis.inventory.of("quarantined"):
        reason = step.quarantine.reason if step.quarantine else "unknown"
        findings.append(
            Finding(severity="warning", text=f"step {step.key.step} is quarantined: {reason}", key=step.record)
        )
    known = {step.key for step in diagnosis.inventory.steps}
    for key, record in diagnosis.quarantined.items():
        if key not in known:
            text = f"step {key.step} was quarantined ({record.key}: {record.reason}) and has been removed since"
            findings.append(Finding(severity="note", text=text))
    if diagnosis.outlook.refusal is not None:
        findings.append(Finding(severity="damage", text=f"a resume would refuse: {diagnosis.outlook.refusal}"))
    run_ids = {step.commit.run_id for step in diagnosis.inventory.steps if step.commit is not None}
    if len(run_ids) > 1:
        text = f"checkpoints of several runs lie here: {', '.join(sorted(run_ids))}; a run sees its own alone"
        findings.append(Finding(severity="warning", text=text))
    return findings


def _record_findings(store: ObjectStore, diagnosis: Diagnosis, listing: Sequence[ObjectEntry]) -> list[Finding]:
    from orchestrator.doctor_records import record_findings

    return [
        Finding(severity=severity, text=text, key=key)
        for severity, text, key in record_findings(store, listing, diagnosis.run_id)
    ]


def _clock_findings(diagnosis: Diagnosis, now_s: float) -> list[Finding]:
    from orchestrator.doctor_records import clock_texts

    commits = [step.commit for step in diagnosis.inventory.steps if step.commit is not None]
    records = [seen.record for seen in diagnosis.drivers if seen.record is not None]
    texts = clock_texts(commits, [record.renewed_at_utc for record in records], now_s, _SKEW_S)
    return [Finding(severity="warning", text=text) for text in texts]
