"""`raysume checkpoints`: list, show and verify what a run has committed. Needs neither Ray nor torch.

Which Checkpoints exist is asked of the commit log alone.
"""

from __future__ import annotations

import json
import time
from datetime import datetime
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from storage.commit_log import CommitLog
    from storage.manifest import Commit
    from storage.object_store import ObjectStore

__all__ = ["CheckpointsCode", "checkpoints"]

checkpoints = typer.Typer(
    name="checkpoints",
    help="List, show and verify the checkpoints of a run.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


class CheckpointsCode(IntEnum):
    """Exit codes of `raysume checkpoints`."""

    OK = 0
    UNREACHABLE = 16  # as ExitCode.STORAGE_OUTAGE
    NOT_FOUND = 20
    CORRUPT = 21


_LIST_EPILOG = """[bold]Example[/bold]

  raysume checkpoints list ./outputs/first-run
"""
_SHOW_EPILOG = """[bold]Example[/bold]

  raysume checkpoints show ./outputs/first-run --step 40
"""
_VERIFY_EPILOG = """[bold]Examples[/bold]

  raysume checkpoints verify s3://bucket/run

  raysume checkpoints verify ./outputs/first-run --step 40 --json

[bold]Exit codes[/bold]

  0 good, 16 storage away, 20 no such checkpoint, 21 damaged
"""

Url = Annotated[str, typer.Argument(help="Root directory or URL of the run.", show_default=False)]
Step = Annotated[int | None, typer.Option("--step", min=0, help="This step only.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@checkpoints.command("list", epilog=_LIST_EPILOG)
def list_commits(url: Url, json_output: Json = False) -> None:
    """List the committed checkpoints, newest last."""
    _, _, commits = _open(url, None)
    if json_output:
        typer.echo(json.dumps([_facts(commit) for commit in commits], indent=2))
        return
    typer.echo(f"{'step':>8}  {'size':>10}  {'age':>12}  {'loss':>8}  attempt")
    for commit in commits:
        facts = _facts(commit)
        loss = "-" if commit.loss is None else f"{commit.loss:.3f}"
        typer.echo(f"{commit.step:>8}  {facts['size']:>10}  {facts['age']:>12}  {loss:>8}  {facts['attempt']}")


@checkpoints.command("show", epilog=_SHOW_EPILOG)
def show(url: Url, step: Step = None, json_output: Json = False) -> None:
    """Show what one checkpoint holds (default: the newest)."""
    _, log, commits = _open(url, step)
    commit = commits[-1]
    facts = _facts(commit) | _manifest_facts(log, commit)
    if json_output:
        typer.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        typer.echo(f"{name:<16}{value}")


@checkpoints.command("verify", epilog=_VERIFY_EPILOG)
def verify(url: Url, step: Step = None, json_output: Json = False) -> None:
    """Read every byte of the checkpoints and check all digests (default: of all of them)."""
    from storage.errors import StorageError
    from storage.verify import verify_commit

    store, log, commits = _open(url, step)
    found: list[dict[str, Any]] = []
    for commit in commits:
        try:
            report = verify_commit(store, log, commit)
        except StorageError as error:
            _fail(CheckpointsCode.UNREACHABLE, str(error))
        problems = [str(problem) for problem in report.problems]
        found.append(_facts(commit) | {"is_good": report.is_good, "problems": problems})
        if not json_output:
            typer.echo(f"step {commit.step:>8}  {'good' if report.is_good else 'DAMAGED'}  {found[-1]['size']}")
            for problem in problems:
                typer.echo(f"    {problem}")
    if json_output:
        typer.echo(json.dumps(found, indent=2))
    if not all(entry["is_good"] for entry in found):
        raise typer.Exit(CheckpointsCode.CORRUPT)


def _open(url: str, step: int | None) -> tuple[ObjectStore, CommitLog, list[Commit]]:
    """The store, its commit log, and the Commits asked for: at least one, or the command ends here."""
    from storage.commit_log import CommitLog
    from storage.errors import StorageError
    from storage.open_store import open_store

    try:
        store = open_store(url)
        log = CommitLog(store, None)
        commits = log.commits()
    except (StorageError, OSError, ValueError) as error:
        _fail(CheckpointsCode.UNREACHABLE, f"{url} cannot be read: {error}")
    if not commits:
        _fail(CheckpointsCode.NOT_FOUND, f"{url} holds no checkpoint; is it the root of a run (run.url)?")
    if step is None:
        return store, log, commits
    wanted = [commit for commit in commits if commit.step == step]
    if not wanted:
        steps = ", ".join(str(commit.step) for commit in commits)
        _fail(CheckpointsCode.NOT_FOUND, f"{url} holds no checkpoint of step {step}; it holds: {steps}")
    return store, log, wanted


def _facts(commit: Commit) -> dict[str, Any]:
    from orchestrator.report_text import duration, size

    age_s = max(0.0, time.time() - datetime.fromisoformat(commit.time_utc).timestamp())
    return {
        "step": commit.step,
        "attempt": commit.attempt.number,
        "time_utc": commit.time_utc,
        "age": duration(age_s),
        "bytes": commit.stored_bytes,
        "size": size(commit.stored_bytes),
        "loss": commit.loss,
    }


def _manifest_facts(log: CommitLog, commit: Commit) -> dict[str, Any]:
    from storage.errors import CorruptCheckpoint, ObjectMissing, StorageError

    try:
        manifest = log.read_manifest(commit)
    except (CorruptCheckpoint, ObjectMissing) as error:
        _fail(CheckpointsCode.CORRUPT, str(error))
    except StorageError as error:
        _fail(CheckpointsCode.UNREACHABLE, str(error))
    return {
        "run_id": manifest.run_id,
        "world_size": manifest.world_size,
        "tensors": len(manifest.tensors),
        "shards": len(manifest.shards),
        "samples": manifest.ledger.position if manifest.ledger else None,
        "manifest": commit.manifest_key,
    }


def _fail(code: CheckpointsCode, message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)
