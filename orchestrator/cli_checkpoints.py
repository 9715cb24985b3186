"""`raysume checkpoints`: list, show and verify what a run has committed. Needs neither Ray nor torch.

Which Checkpoints exist is asked of the commit log alone.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from storage.commit_log import CommitLog
    from storage.keys import StepKey
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
    REFUSED = 10  # as ExitCode.CONFIG_ERROR: this URL will never work as it is
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

  0 good, 10 URL refused, 16 storage away, 20 no such checkpoint, 21 damaged
"""

Url = Annotated[str, typer.Argument(help="Root directory or URL of the run.", show_default=False)]
Step = Annotated[int | None, typer.Option("--step", min=0, help="This step only.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@checkpoints.command("list", epilog=_LIST_EPILOG)
def list_commits(url: Url, json_output: Json = False) -> None:
    """List the committed checkpoints, newest last."""
    found = _open(url, None)
    commits = found.commits
    if json_output:
        typer.echo(json.dumps([_facts(commit) for commit in commits], indent=2))
    if not commits:
        _fail_without(found)
    if json_output:
        return
    typer.echo(f"{'step':>8}  {'size':>10}  {'age':>12}  {'loss':>8}  attempt")
    for commit in commits:
        facts = _facts(commit)
        loss = "-" if commit.loss is None else f"{commit.loss:.3f}"
        typer.echo(f"{commit.step:>8}  {facts['size']:>10}  {facts['age']:>12}  {loss:>8}  {facts['attempt']}")


@checkpoints.command("show", epilog=_SHOW_EPILOG)
def show(url: Url, step: Step = None, json_output: Json = False) -> None:
    """Show what one checkpoint holds (default: the newest)."""
    found = _open(url, step)
    if not found.commits:
        _fail_without(found)
    commit = found.commits[-1]
    facts = _facts(commit) | _manifest_facts(found.log, commit)
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

    found = _open(url, step)
    entries: list[dict[str, Any]] = []
    for commit in found.commits:
        try:
            report = verify_commit(found.store, found.log, commit)
        except StorageError as error:
            _fail(_code_of(error), str(error))
        problems = [str(problem) for problem in report.problems]
        entries.append(_facts(commit) | {"is_good": report.is_good, "problems": problems})
        if not json_output:
            _print_verified(entries[-1])
    for key in found.unreadable:
        entries.append(_unreadable_facts(key))
        if not json_output:
            _print_verified(entries[-1])
    if json_output:
        typer.echo(json.dumps(entries, indent=2))
    if not entries:
        _fail_without(found)
    if not all(entry["is_good"] for entry in entries):
        raise typer.Exit(CheckpointsCode.CORRUPT)


def _print_verified(entry: dict[str, Any]) -> None:
    size = entry["size"] or ""
    typer.echo(f"step {entry['step']:>8}  {'good' if entry['is_good'] else 'DAMAGED'}  {size}".rstrip())
    for problem in entry["problems"]:
        typer.echo(f"    {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The Commits asked for, and those whose record cannot be read. ``steps`` are all that could be asked for."""

    url: str
    step: int | None
    store: ObjectStore
    log: CommitLog
    commits: list[Commit]
    unreadable: list[StepKey]
    steps: list[int]


def _open(url: str, step: int | None) -> _Found:
    """What is committed under ``url``; the command ends here when it cannot be read."""
    from storage.commit_log import CommitLog, effective_history
    from storage.errors import StorageError
    from storage.keys import parse_step_key
    from storage.open_store import open_store

    try:
        store = open_store(url)
        log = CommitLog(store, None)
        scan, quarantined = log.scan(), log.quarantined_keys()
    except (StorageError, OSError, ValueError) as error:
        _fail(_code_of(error), f"{url} cannot be read: {error}")
    commits = effective_history(scan.commits, quarantined)
    unreadable = [key for name in scan.unreadable if (key := parse_step_key(name)) and key not in quarantined]
    return _Found(
        url=url,
        step=step,
        store=store,
        log=log,
        commits=[commit for commit in commits if step in (None, commit.step)],
        unreadable=[key for key in unreadable if step in (None, key.step)],
        steps=[commit.step for commit in commits],
    )


def _fail_without(found: _Found) -> NoReturn:
    """End a command for which there is no Commit to work on."""
    from storage.keys import commit_key

    if found.unreadable:
        names = ", ".join(commit_key(key) for key in found.unreadable)
        _fail(CheckpointsCode.CORRUPT, f"{found.url} holds only commit records that cannot be read: {names}")
    if found.steps:
        steps = ", ".join(map(str, found.steps))
        _fail(CheckpointsCode.NOT_FOUND, f"{found.url} holds no checkpoint of step {found.step}; it holds: {steps}")
    _fail(CheckpointsCode.NOT_FOUND, f"{found.url} holds no checkpoint; is it the root of a run (run.url)?")


def _code_of(error: Exception) -> CheckpointsCode:
    from storage.errors import StoreRefused

    return CheckpointsCode.REFUSED if isinstance(error, StoreRefused) else CheckpointsCode.UNREACHABLE


def _unreadable_facts(key: StepKey) -> dict[str, Any]:
    """As `_facts` and verify's own, of a Commit that says nothing."""
    from storage.keys import commit_key

    unknown = dict.fromkeys(("time_utc", "age", "bytes", "size", "loss"))
    problems = [f"{commit_key(key)}: the commit record cannot be read"]
    return {"step": key.step, "attempt": key.attempt.number, **unknown, "is_good": False, "problems": problems}


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
        _fail(_code_of(error), str(error))
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
