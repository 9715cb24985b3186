"""`raysume data audit`: proves from a Checkpoint, or from an exported ledger, which samples came when. Reads only.

Needs neither Ray nor torch, nor the dataset: only the records of the Run.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli_checkpoints_place import CheckpointsCode, Json, ending, fail, fail_without, print_json
from orchestrator.cli_control import open_run

if TYPE_CHECKING:
    from orchestrator.data_record import DataRecord
    from orchestrator.work_done import WorkDone

__all__ = ["AUDIT_EPILOG", "audit"]

AUDIT_EPILOG = """[bold]Examples[/bold]

  raysume data audit ./outputs/first-run

  raysume data audit s3://bucket/run --step 1200 --json

  raysume data audit ./outputs/first-run --export ledger.jsonl

  raysume data audit ledger.jsonl

[bold]Exit codes[/bold]

  0 proven, 10 URL refused, 14 stopped, 16 storage away, 20 no such checkpoint, 21 not proven, or damaged
"""


def audit(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Root directory or URL of the run, its YAML file, or an exported ledger.",
            show_default=False,
        ),
    ],
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Of this checkpoint (default: the newest).", show_default=False)
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option("--export", dir_okay=False, help="Also write the ledger to this file.", show_default=False),
    ] = None,
    json_output: Json = False,
) -> None:
    """Prove that each sample was trained on once an epoch, in order, over all attempts and world sizes."""
    from orchestrator.data_audit_text import audit_facts, audit_text
    from orchestrator.data_record import audit_record, exported
    from workers.ledger import LedgerUnreadable

    with ending(run):
        try:
            record, work = _read_file(Path(run), step) if _is_exported(run) else _read_run(run, step)
            if export is not None:
                export.write_text(exported(record), encoding="utf-8")
            total = 0 if record.ledger is None else sum(one.samples for one in record.ledger.trained)
            with _bar(total, hidden=json_output) as advance:
                report = audit_record(record, told={} if work is None else work.chains, progress=advance)
        except (LedgerUnreadable, ValueError, MemoryError) as error:
            fail(CheckpointsCode.CORRUPT, f"{run}: {error}")
        except OSError as error:
            fail(CheckpointsCode.REFUSED, f"{run}: {error}")
    if report is None:
        text = (
            f"step {record.claims.step} has no ledger: it was saved by a release that kept no ledger, or by a loop "
            "whose samples are not in the order of a Session. Its chain is not that of equal batches in order either"
        )
        fail(CheckpointsCode.CORRUPT, f"{run}: {text}: nothing can be proven of its samples")
    rolled_back = None if work is None else work.rolled_back
    if json_output:
        print_json({"run_id": record.run_id, "step": record.claims.step} | audit_facts(report, rolled_back))
    else:
        typer.echo(f"Run {record.run_id}, checkpoint of step {record.claims.step} (attempt {record.attempt})")
        typer.echo(audit_text(report, rolled_back))
    if not report.is_proven:
        raise typer.Exit(CheckpointsCode.CORRUPT)


def _is_exported(run: str) -> bool:
    return "://" not in run and not run.endswith((".yaml", ".yml")) and Path(run).is_file()


def _read_file(path: Path, step: int | None) -> tuple[DataRecord, None]:
    from orchestrator.data_record import record_in

    record = record_in(path.read_text(encoding="utf-8"))
    if step not in (None, record.claims.step):
        fail(CheckpointsCode.NOT_FOUND, f"{path} is the ledger of step {record.claims.step}, not of step {step}")
    return record, None


def _read_run(run: str, step: int | None) -> tuple[DataRecord, WorkDone | None]:
    from orchestrator.data_record import record_of
    from orchestrator.event_tail import each_event
    from orchestrator.work_done import work_done
    from storage.commit_log import CommitLog
    from storage.errors import ObjectMissing
    from storage.inventory import take_inventory
    from storage.keys import EVENTS

    url, store = open_run(run)
    log = CommitLog(store, None)
    inventory = take_inventory(log, with_cut_off=False)
    commits = [commit for commit in inventory.history if step in (None, commit.step)]
    if not commits:
        fail_without(inventory, url, step)
    record = record_of(log.read_manifest(commits[-1]))
    try:
        events = each_event(store.get(EVENTS))
    except ObjectMissing:
        return record, None
    return record, work_done(events, attempt=record.attempt, step=record.claims.step)


@contextlib.contextmanager
def _bar(total: int, *, hidden: bool) -> Iterator[Callable[[int], None]]:
    """A bar on stderr where that is a terminal; elsewhere nothing. Yields what is told the samples dealt with."""
    if hidden or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("samples", total=total)
        yield lambda num_samples: bars.advance(task, num_samples)
