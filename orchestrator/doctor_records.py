"""What `doctor` sees beside the Checkpoints: run.json, the Journal, the summary, and what clocks say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Literal

from orchestrator.journal import Journal
from orchestrator.report_text import duration
from storage.errors import ObjectMissing
from storage.events import utc_text
from storage.keys import JOURNAL, RUN, SUMMARY
from storage.manifest import Commit
from storage.object_store import ObjectEntry, ObjectStore
from storage.unfinished import unfinished_uploads

__all__ = ["clock_texts", "record_findings"]

_Found = tuple[Literal["damage", "warning", "note"], str, str | None]


def record_findings(store: ObjectStore, listing: Sequence[ObjectEntry], run_id: str | None) -> Iterator[_Found]:
    """Severity, text and key of each thing worth saying."""
    present = {entry.key for entry in listing}
    for key in (RUN, SUMMARY):
        if key in present:
            yield from _json_findings(store, key, run_id)
    if run_id is not None and RUN not in present:
        text = f"{RUN} is missing: the commits say that this is run {run_id}, and the next driver writes it anew"
        yield "note", text, RUN
    yield from _journal_findings(store, listing)
    uploads = unfinished_uploads(store)
    if uploads:
        shown = ", ".join(uploads[:3]) + (" ..." if len(uploads) > 3 else "")
        text = f"unfinished uploads: {len(uploads)} ({shown}); under way, or remains of one that was cut off"
        yield "note", text, None


def _json_findings(store: ObjectStore, key: str, run_id: str | None) -> Iterator[_Found]:
    try:
        said = json.loads(store.get(key))
    except ObjectMissing:  # removed since the listing
        return
    except ValueError as error:
        cure = "remove it; the commits say which run this is" if key == RUN else "it is only a report; remove it"
        yield "damage" if key == RUN else "warning", f"{key} cannot be read ({error}): {cure}", key
        return
    named = said.get("run_id") if isinstance(said, dict) else None
    if key == RUN and not isinstance(named, str):
        yield "damage", f"{key} names no run: remove it; the commits say which run this is", key
    elif named is not None and run_id is not None and named != run_id:
        yield "warning", f"{key} names run {named}, the newest commit is of run {run_id}", key


def _journal_findings(store: ObjectStore, listing: Sequence[ObjectEntry]) -> Iterator[_Found]:
    names = [entry.key for entry in listing if entry.key.startswith(JOURNAL)]
    journal = Journal(store, "0" * 8, lambda: utc_text(0.0))
    journal.load()
    unreadable = len(names) - len(journal.entries)
    if unreadable > 0:
        text = (
            f"{unreadable} of {len(names)} journal entries cannot be read: a new driver counts attempts and failures "
            "from the others"
        )
        yield "warning", text, JOURNAL


def clock_texts(commits: Sequence[Commit], lease_times: Sequence[str], now_s: float, skew_s: float) -> list[str]:
    """Signs that clocks disagree; nothing in a Run's safety rests on them, retention by age and reports do."""
    texts = []
    times = [(commit, _epoch_s(commit.time_utc)) for commit in commits]
    known = [(commit, at_s) for commit, at_s in times if at_s is not None]
    latest = max([at_s for _, at_s in known] + [at for at in map(_epoch_s, lease_times) if at is not None], default=0.0)
    if latest > now_s + skew_s:
        texts.append(
            f"records are {duration(latest - now_s)} ahead of this machine's clock: one of the clocks is wrong"
        )
    in_order = sorted(known, key=lambda pair: (pair[0].attempt.number, pair[0].step))
    for (before, before_s), (after, after_s) in pairwise(in_order):
        if before_s > after_s + skew_s:
            texts.append(
                f"step {after.step} (attempt {after.attempt.number}) was committed {duration(before_s - after_s)} "
                f"before step {before.step} (attempt {before.attempt.number}) by their clocks: a clock was set back, "
                "or two machines disagree"
            )
    return texts[:5]


def _epoch_s(time_utc: str) -> float | None:
    try:
        return datetime.fromisoformat(time_utc).timestamp()
    except ValueError:
        return None
