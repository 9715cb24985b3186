"""What all `raysume checkpoints` commands share: opening a Run's place, how a command ends, and asking before changes.

Loads neither the stores nor pydantic until a command needs them.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from storage.commit_log import CommitLog
    from storage.inventory import Inventory
    from storage.manifest import Commit
    from storage.object_store import ObjectStore

__all__ = [
    "CheckpointsCode",
    "DryRun",
    "Force",
    "Json",
    "Place",
    "StepArgument",
    "Url",
    "Yes",
    "code_of",
    "commit_facts",
    "ending",
    "fail",
    "fail_without",
    "may_go_on",
    "open_place",
    "print_json",
    "progress_bar",
    "refuse_beside_a_driver",
]


class CheckpointsCode(IntEnum):
    """Exit codes of the commands that work on a Run's place: `checkpoints`, `doctor`, `scale`, `save`, `stop`."""

    OK = 0
    USAGE = 2
    REFUSED = 10  # as ExitCode.CONFIG_ERROR: this will never work as it is
    STOPPED = 14  # as ExitCode.STOPPED
    UNREACHABLE = 16  # as ExitCode.STORAGE_OUTAGE
    IN_USE = 18  # as ExitCode.REFUSED: a driver holds the Run
    NOT_FOUND = 20
    CORRUPT = 21
    NO_DRIVER = 22
    REFUSED_BY_DRIVER = 23
    NO_ANSWER = 24


Url = Annotated[str, typer.Argument(help="Root directory or URL of the run.", show_default=False)]
StepArgument = Annotated[int | None, typer.Argument(min=0, help="Step (default: see above).", show_default=False)]


@dataclass(slots=True)
class _Output:
    """What the command of this process was asked to print, and whether it has."""

    is_json: bool = False
    has_printed: bool = False


_output = _Output()


def _begin_output(is_json: bool) -> bool:
    _output.is_json, _output.has_printed = is_json, False
    return is_json


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.", callback=_begin_output)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Show what would be done, change nothing.")]
Force = Annotated[bool, typer.Option("--force", help="Even while a driver holds the run. Read the warning.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An opened place of a Run. ``url`` as it was typed."""

    url: str
    store: ObjectStore
    log: CommitLog


def open_place(url: str) -> Place:
    """Open ``url`` and see that it answers; the command ends here when it does not."""
    import logging

    from storage.commit_log import CommitLog
    from storage.open_store import open_store

    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(message)s")
    try:
        store = open_store(url)
        log = CommitLog(store, None)
        log.quarantined_keys()
    except (OSError, ValueError) as error:  # a URL that no store could be made from
        fail(CheckpointsCode.REFUSED, f"{url} cannot be read: {error}")
    return Place(url=url, store=store, log=log)


@contextlib.contextmanager
def ending(url: str) -> Iterator[None]:
    """Errors of the store become one line and an exit code."""
    from storage.errors import StorageError

    try:
        yield
    except StorageError as error:
        fail(code_of(error), f"{url}: {error}")
    except KeyboardInterrupt:
        fail(CheckpointsCode.STOPPED, "stopped")


def code_of(error: Exception) -> CheckpointsCode:
    """Which way a command ends for an error of the store."""
    from storage.errors import CorruptCheckpoint, ObjectMissing, StoreRefused, StoreUnavailable

    match error:
        case StoreRefused():
            return CheckpointsCode.REFUSED
        case StoreUnavailable():
            return CheckpointsCode.UNREACHABLE
        case CorruptCheckpoint():
            return CheckpointsCode.CORRUPT
        case ObjectMissing():
            return CheckpointsCode.NOT_FOUND
        case _:  # a copy over something else, a format of another version
            return CheckpointsCode.REFUSED


def fail(code: CheckpointsCode, message: str) -> NoReturn:
    """End the command: the reason on stderr, and with ``--json`` on stdout too, unless that holds JSON already."""
    if _output.is_json and not _output.has_printed:
        print_json({"error": message, "exit_code": int(code)})
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)


def fail_without(inventory: Inventory, url: str, step: int | None) -> NoReturn:
    """End a command for which there is no Checkpoint to work on."""
    unreadable = [found.record for found in inventory.of("unreadable") if step in (None, found.key.step)]
    if unreadable:
        names = ", ".join(unreadable)
        usable = ", ".join(str(commit.step) for commit in inventory.history[-20:])
        rest = f"usable are the checkpoints of steps {usable}" if usable else "there is no other checkpoint"
        fail(CheckpointsCode.CORRUPT, f"{url}: commit records that cannot be read: {names}; {rest}")
    steps = [commit.step for commit in inventory.history]
    if step is not None and steps:
        shown = ", ".join(map(str, steps[-20:]))
        fail(CheckpointsCode.NOT_FOUND, f"{url} holds no checkpoint of step {step}; it holds: {shown}")
    others = [f"step {found.key.step} is {found.standing}" for found in inventory.steps][-5:]
    more = f" ({'; '.join(others)})" if others else ""
    cut_off = f"; {len(inventory.cut_off)} saves there were cut off before their commit" if inventory.cut_off else ""
    what = "no usable checkpoint" if others else "no checkpoint"
    fail(CheckpointsCode.NOT_FOUND, f"{url} holds {what}{more}{cut_off}; is it the root of a run (run.url)?")


def commit_facts(commit: Commit) -> dict[str, Any]:
    """A Commit as JSON, with size and age for people beside the exact numbers."""
    from orchestrator.report_text import duration, size
    from storage.pruning import age_s_of

    return {
        "step": commit.step,
        "attempt": commit.attempt.number,
        "time_utc": commit.time_utc,
        "age": f"{duration(age_s_of(commit, time.time()))} ago",
        "bytes": commit.stored_bytes,
        "size": size(commit.stored_bytes),
        "loss": commit.loss,
        "metric": commit.metric,
        "base_step": commit.base_step,
    }


def print_json(value: object) -> None:
    _output.has_printed = True
    typer.echo(json.dumps(value, indent=2))


def may_go_on(plan: Sequence[str], *, yes: bool, dry_run: bool, quiet: bool = False) -> bool:
    """Show ``plan``, then ask unless told. False: change nothing. Without a terminal only ``yes`` goes on."""
    if not quiet:
        for line in plan:
            typer.echo(line)
    if dry_run:
        if not quiet:
            typer.echo("nothing was changed (--dry-run)")
        return False
    if yes:
        return True
    if quiet or not _is_interactive():
        fail(CheckpointsCode.USAGE, "this changes the run: add --yes to do it, or --dry-run to see what it would do")
    if not typer.confirm("go on?"):
        typer.echo("nothing was changed")
        return False
    return True


def _is_interactive() -> bool:
    return sys.stdin.isatty()


def refuse_beside_a_driver(store: ObjectStore, *, force: bool, watch_s: float = 15.0) -> None:
    """End the command while a living driver holds the Run; ``force`` only warns."""
    from storage.lease_watch import watch_drivers

    def say(sighting: object, limit_s: float) -> None:
        typer.echo(f"watching for at most {limit_s:g} s whether a driver still holds this run: {sighting}", err=True)

    alive = [seen for seen in watch_drivers(store, ttl_s=watch_s, on_wait=say) if seen.is_alive]
    if not alive:
        return
    if not force:
        fail(CheckpointsCode.IN_USE, f"this run is being driven by {alive[0]}; stop it first, or add --force")
    typer.echo(
        f"WARNING: this run is being driven by {alive[0]}. What is deleted or changed beside it can make its next "
        "restart fail or lose work.",
        err=True,
    )


@contextlib.contextmanager
def progress_bar(title: str, total_bytes: int, *, hidden: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar on stderr where that is a terminal; elsewhere nothing. Yields what is told the bytes dealt with."""
    if hidden or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        *(TextColumn("{task.description}"), BarColumn(), DownloadColumn()),
        *(TransferSpeedColumn(), TimeRemainingColumn()),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=total_bytes)
        yield lambda num_bytes: bars.advance(task, num_bytes)
