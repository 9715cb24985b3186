"""Whether a Run has nothing left to do: asked of the store alone, before any cluster is started. Writes nothing."""

from __future__ import annotations

import json
import logging
from typing import TextIO, cast

from orchestrator.config import RunConfig
from orchestrator.errors import cannot_start
from orchestrator.next_steps import chaos_nodes
from orchestrator.report_text import report_text
from orchestrator.summary import RunSummary
from storage.commit_log import CommitLog
from storage.errors import ObjectMissing, StorageError, StoreRefused, StoreUnavailable
from storage.keys import SUMMARY
from storage.object_store import ObjectStore
from storage.open_store import open_store
from storage.verify import verify_commit

__all__ = ["DEEP_BYTES", "finished_summary", "has_whole_end", "show_finished"]

_log = logging.getLogger(__name__)
DEEP_BYTES = 2 << 30


def finished_summary(config: RunConfig) -> RunSummary | None:
    """The summary of a Run that has committed ``run.steps`` and said so; None when there is, or may be, work to do.

    Raises StartOutage where the store does not answer: nothing can begin then, and asking twice takes twice as long.
    """
    if config.run.resume != "auto":
        return None
    try:
        store = open_store(config.run.url, config.checkpoint.store)
        if not has_whole_end(store, CommitLog(store, None), config.run.steps):
            return None
        summary = json.loads(store.get(SUMMARY))
    except (StorageError, ObjectMissing, ValueError) as error:
        if isinstance(error, StoreUnavailable) and not isinstance(error, StoreRefused):
            raise cannot_start(config.run.url, f"run.url cannot be reached: {error}", error) from error
        _log.debug("whether the run is finished cannot be seen: %s", error)
        return None
    is_finished = isinstance(summary, dict) and summary.get("status") == "finished"
    return cast(RunSummary, summary) if is_finished else None


def has_whole_end(store: ObjectStore, log: CommitLog, steps: int) -> bool:
    """Whether ``steps`` is committed and the Checkpoint is what was committed: a damaged end is trained again.

    Every byte is read up to DEEP_BYTES; of a larger one the Manifest's digest and the presence and size of each Shard.
    """
    newest = log.latest()
    if newest is None or newest.step < steps:
        return False
    report = verify_commit(store, log, newest, deep=newest.stored_bytes <= DEEP_BYTES)
    for problem in report.problems:
        _log.warning("the last Checkpoint is damaged, so the run goes on: %s", problem)
    return report.is_good


def show_finished(
    summary: RunSummary, config: RunConfig, to: TextIO, *, json_output: bool, asked: tuple[str, ...]
) -> None:
    """Say again what the finished Run's report said."""
    if json_output:
        to.write(json.dumps(summary, indent=1) + "\n")
        return
    steps = max([summary["steps"], *(commit["step"] for commit in summary["commits"])])
    raised = (
        f"Raise run.steps (now {config.run.steps}){' beyond that' if steps > config.run.steps else ''} to train on."
    )
    to.write(f"Nothing to do: this run has finished step {steps}. {raised}\n\n")
    text = report_text(summary, url=config.run.url, asked=asked, nodes=chaos_nodes(config.world))
    to.write(text + "\n")
