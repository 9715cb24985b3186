"""`raysume checkpoints copy`: takes Checkpoints to another place, from which the run can be resumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli_checkpoints_place import (
    CheckpointsCode,
    DryRun,
    Force,
    Json,
    Yes,
    commit_facts,
    ending,
    fail,
    fail_without,
    may_go_on,
    open_place,
    print_json,
    progress_bar,
    refuse_beside_a_driver,
)

if TYPE_CHECKING:
    from orchestrator.cli_checkpoints_place import Place
    from storage.manifest import Commit

__all__ = ["COMMANDS", "copy"]

_COPY_EPILOG = """[bold]Examples[/bold]

  raysume checkpoints copy ./outputs/first-run s3://bucket/first-run

  raysume checkpoints copy s3://bucket/run s3://archive/run --all --yes

Stopped half-way? The same command goes on: what is there and whole is not sent again. Then resume from the copy with
run.url=DST.
"""


def copy(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Root of the run.", show_default=False)],
    target: Annotated[str, typer.Argument(metavar="DST", help="Root of the copy.", show_default=False)],
    step: Annotated[
        int | None, typer.Option(min=0, help="This step (default: the newest).", show_default=False)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every usable checkpoint.")] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    force: Force = False,
    json_output: Json = False,
) -> None:
    """Copy checkpoints to DST, checking every digest; the commit goes last. Never replaces anything there."""
    from storage.copying import check_target
    from storage.inventory import take_inventory

    if every and step is not None:
        raise typer.BadParameter("give either --step or --all")
    with ending(source):
        origin = open_place(source)
        inventory = take_inventory(origin.log, with_cut_off=False)
        commits = [commit for commit in inventory.history if step in (None, commit.step)]
        if not commits:
            fail_without(inventory, source, step)
        commits = commits if every else commits[-1:]
        unreadable = ", ".join(found.record for found in inventory.of("unreadable")) if every else ""
    with ending(target):
        place = open_place(target)
        check_target(place.log, commits)
        facts = {"source": source, "target": target, "steps": [commit_facts(commit) for commit in commits]}
        if not may_go_on(_plan_lines(commits, target), yes=yes, dry_run=dry_run, quiet=json_output):
            if json_output:
                print_json(facts | {"changed": False})
            return
        refuse_beside_a_driver(place.store, force=force)
    with ending(f"{source} to {target}"):
        reports = _copy_all(origin, place, commits, json_output)
    if json_output:
        print_json(facts | {"changed": True, "copied": reports})
    else:
        typer.echo(f"resume from the copy with: raysume run CONFIG run.url={target}")
    if unreadable:
        fail(CheckpointsCode.CORRUPT, f"{source}: not copied, as their commit records cannot be read: {unreadable}")


COMMANDS = (("copy", copy, _COPY_EPILOG),)


def _copy_all(origin: Place, place: Place, commits: list[Commit], quiet: bool) -> list[dict[str, Any]]:
    from orchestrator.report_text import size
    from storage.copying import copy_checkpoint, copy_run_record

    copy_run_record(origin.store, place.store, commits[-1].run_id)
    reports: list[dict[str, Any]] = []
    with progress_bar("copying", sum(commit.stored_bytes for commit in commits), hidden=quiet) as advance:
        for commit in commits:
            report = copy_checkpoint(origin.log, place.log, commit, progress=advance)
            told = {"step": commit.step, "objects_sent": report.objects_sent, "bytes_sent": report.bytes_sent}
            reports.append(told | {"bytes_kept": report.bytes_kept, "was_there": report.was_there})
            if not quiet:
                kept = f", {size(report.bytes_kept)} was there" if report.bytes_kept else ""
                typer.echo(f"step {commit.step:>8}  {size(report.bytes_sent)} sent{kept}")
    return reports


def _plan_lines(commits: list[Commit], target: str) -> list[str]:
    from orchestrator.report_text import size

    steps = ", ".join(str(commit.step) for commit in commits)
    return [f"copy step {steps} ({size(sum(commit.stored_bytes for commit in commits))}) to {target}"]
