"""Whether a Run has nothing left to do: asked of the store alone, before any cluster is started. Writes nothing."""

from __future__ import annotations

import json
import logging
from typing import TextIO, cast

from orchestrator.config import RunConfig
from orchestrator.report_text import report_text
from orchestrator.summary import RunSummary
from storage.commit_log import CommitLog
from storage.errors import ObjectMissing, StorageError
from storage.keys import SUMMARY
from storage.open_store import open_store

__all__ = ["finished_summary", "show_finished"]

_log = logging.getLogger(__name__)


def finished_summary(config: RunConfig) -> RunSummary | None:
    """The summary of a Run that has committed ``run.steps`` and said so; None when there is, or may be, work to do."""
    if config.run.resume != "auto":
        return None
    try:
        store = open_store(config.run.url, config.checkpoint.store)
        newest = CommitLog(store, None).latest()
        if newest is None or newest.step < config.run.steps:
            return None
        summary = json.loads(store.get(SUMMARY))
    except (StorageError, ObjectMissing, ValueError) as error:
        _log.debug("whether the run is finished cannot be seen: %s", error)
        return None
    is_finished = isinstance(summary, dict) and summary.get("status") == "finished"
    return cast(RunSummary, summary) if is_finished else None


def show_finished(summary: RunSummary, config: RunConfig, to: TextIO, *, json_output: bool, config_path: str) -> None:
    """Say again what the finished Run's report said."""
    if json_output:
        to.write(json.dumps(summary, indent=1) + "\n")
        return
    to.write(f"Nothing to do: this run has finished. Raise run.steps (now {config.run.steps}) to train on.\n\n")
    to.write(report_text(summary, url=config.run.url, config_path=config_path) + "\n")
