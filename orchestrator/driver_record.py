"""What one driver writes down for people: the event file, live progress, and at the end summary.json and the report."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from orchestrator.config import RunConfig
from orchestrator.controller import RunEnd
from orchestrator.event_mirror import EventMirror, fetch_events
from orchestrator.exit_codes import ExitCode
from orchestrator.next_steps import chaos_nodes
from orchestrator.options import DriverOptions
from orchestrator.patient_store import PatientStore
from orchestrator.progress import ProgressView, open_progress
from orchestrator.report_text import report_text
from orchestrator.run_identity import RunIdentity, make_run_id
from orchestrator.summary import begins_history, summarize
from storage.commit_log import CommitLog
from storage.errors import StorageError
from storage.events import EventLog, read_events
from storage.keys import EVENTS, SUMMARY
from storage.object_store import ObjectStore

__all__ = ["DriverRecord", "events_path_of"]

_log = logging.getLogger(__name__)
_LAST_WORD_S = 10.0  # a store that hangs must not hold up the exit


def events_path_of(run_url: str, run_id: str) -> Path:
    """The local event file: in the Run's own directory where that is local, else beside other temporary files."""
    if "://" not in run_url or run_url.startswith("file://"):
        return Path(run_url.removeprefix("file://")) / EVENTS
    # A copied Run has the id of the original: the URL keeps their events apart.
    return Path(tempfile.gettempdir()) / "raysume" / make_run_id(run_id, run_url) / EVENTS


class _TeeSink:
    """An EventSink that also feeds the progress display."""

    def __init__(self, log: EventLog, view: ProgressView) -> None:
        self._log = log
        self._view = view
        self._lock = threading.Lock()  # the verifier's thread emits too

    def emit(
        self, event: str, *, attempt: int | None = None, step: int | None = None, rank: int | None = None, **fields: Any
    ) -> None:
        with self._lock:
            self._log.emit(event, attempt=attempt, step=step, rank=rank, **fields)
            self._view.on_event({"event": event, "attempt": attempt, "step": step, "rank": rank, **fields})


class DriverRecord:
    """A context: opens the event file, closes it and the display whatever happens. ``one_try``: without retries."""

    def __init__(
        self,
        store: ObjectStore,
        one_try: ObjectStore,
        identity: RunIdentity,
        config: RunConfig,
        options: DriverOptions,
        report_to: TextIO,
    ) -> None:
        self._last_word = PatientStore(one_try, limit_s=_LAST_WORD_S, deadline_s=_LAST_WORD_S)
        self._one_try = one_try
        self._identity = identity
        self._config = config
        self._options = options
        self._report_to = report_to
        self._path = options.events_path or events_path_of(config.run.url, identity.run_id)
        fetch_events(store, self._path)
        before = _Before() if identity.is_new else _read_before(self._path)
        self.newest_step = before.newest_step
        since_start_s = before.finished_s
        self.trained_until_s = None if since_start_s is None else identity.start_unix_s + since_start_s
        self.start_unix_s = identity.start_unix_s
        self._log = EventLog(self._path, identity.run_id, started_at_s=identity.start_unix_s)
        is_shown = options.show_progress and not options.json_output
        self._view = open_progress(total_steps=config.run.steps, is_shown=is_shown)
        self.sink = _TeeSink(self._log, self._view)
        is_in_place = self._path.resolve() == events_path_of(config.run.url, identity.run_id).resolve()
        is_local = "://" not in config.run.url or config.run.url.startswith("file://")
        self._mirror = None if is_local and is_in_place else EventMirror(one_try, self._path)

    def __enter__(self) -> Self:
        self.sink.emit(
            "run_started",
            run_id=self._identity.run_id,
            steps=self._config.run.steps,
            url=self._config.run.url,
            start_unix_s=self._identity.start_unix_s,
            is_new=self._identity.is_new,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._view.close()
        self._log.close()
        if self._mirror is not None:
            self._mirror.close()

    def driver_started(self, *, nonce: str, first_attempt: int, durable_step: int) -> None:
        """Say who drives, and what it found of the Run. ``durable_step``: of the newest usable Checkpoint, 0: none."""
        self.sink.emit(
            "driver_started",
            nonce=nonce,
            pid=os.getpid(),
            first_attempt=first_attempt,
            reached_step=max(self.newest_step, durable_step),
            durable_step=durable_step,
        )

    def note(self, line: str) -> None:
        """A line for people that stays on the screen."""
        self._view.note(line)

    def finish(self, end: RunEnd) -> ExitCode:
        """Write run_finished and summary.json, print the report; returns the exit code."""
        status = "finished" if end.exit_code is ExitCode.SUCCESS else end.exit_code.name.lower().replace("_", "-")
        self.sink.emit(
            "run_finished",
            status=status,
            exit_reason=end.reason,
            exit_code=int(end.exit_code),
            weights_digest=end.weights_digest,
        )
        self._view.close()
        if end.exit_code is ExitCode.REFUSED:
            return end.exit_code
        summary = summarize(read_events(self._path))
        text = json.dumps(summary, indent=1)
        try:
            with self._last_word.patience(lambda reason, _: _log.debug("summary.json: %s", reason)):
                self._last_word.put(SUMMARY, text.encode(), deadline_s=_LAST_WORD_S)
        except StorageError as error:
            _log.error("summary.json could not be written: %s", error)
        if self._options.json_output:
            self._report_to.write(text + "\n")
        else:
            nodes = chaos_nodes(self._config.world)
            asked, in_use = self._options.asked, self._in_use()
            text = report_text(summary, url=self._config.run.url, asked=asked, nodes=nodes, in_use=in_use)
            self._report_to.write(text + "\n")
        self._report_to.flush()
        return end.exit_code

    def _in_use(self) -> frozenset[int] | None:
        """Steps; None where the store does not say."""
        try:
            return frozenset(commit.step for commit in CommitLog(self._one_try, self._identity.run_id).commits())
        except StorageError as error:
            _log.debug("which Checkpoints are there is not known: %s", error)
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Before:
    """What earlier drivers did. ``finished_s``: when the last step was finished, in seconds since the Run's start."""

    newest_step: int = 0
    finished_s: float | None = None


def _read_before(path: Path) -> _Before:
    """The newest step that earlier drivers finished and did not roll back, and when they last trained, from events."""
    newest_step, finished_s = 0, None
    for event in read_events(path) if path.exists() else ():
        if begins_history(event):
            newest_step, finished_s = 0, None
        elif event.get("event") == "step":
            newest_step = max(newest_step, int(event.get("step") or 0))
            finished_s = event.get("finished_s", finished_s)
        elif event.get("event") == "attempt_started":
            newest_step = int(event.get("restored_step") or 0)
    return _Before(newest_step=newest_step, finished_s=finished_s)
