"""`raysume checkpoints list`, `show` and `verify`: read only."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli_checkpoints_place import (
    CheckpointsCode,
    Json,
    Place,
    StepArgument,
    Url,
    code_of,
    commit_facts,
    ending,
    fail,
    fail_without,
    open_place,
    print_json,
    progress_bar,
)

if TYPE_CHECKING:
    from orchestrator.verified_column import VerifiedColumn
    from storage.inventory import CutOffSave, Inventory, StoredStep
    from storage.manifest import Commit

__all__ = ["COMMANDS", "list_commits", "show", "verify"]

_MANIFESTS_READ = 32
_DAMAGED = "damaged"

_LIST_EPILOG = """[bold]Examples[/bold]

  raysume checkpoints list ./outputs/first-run

  raysume checkpoints list s3://bucket/run --json

[bold]Marks[/bold]

  newest and best are kept by retention; void: a newer attempt went on from an earlier step; quarantined: found
  damaged, or taken out of use by hand; damaged: its manifest is not what was committed; unreadable: its commit record
  is damaged; cut off: never committed

[bold]Verified[/bold]

  in the background, by a run's driver: its digests, or by a load that gave the loss of its probe again; a short run
  ends before that
"""
_SHOW_EPILOG = """[bold]Examples[/bold]

  raysume checkpoints show ./outputs/first-run

  raysume checkpoints show ./outputs/first-run 40 --json
"""
_VERIFY_EPILOG = """[bold]Examples[/bold]

  raysume checkpoints verify s3://bucket/run

  raysume checkpoints verify ./outputs/first-run 40 --json

  raysume checkpoints verify ./outputs/first-run --quick

[bold]Exit codes[/bold]

  0 good, 10 URL refused, 16 storage away, 20 no such checkpoint, 21 damaged
"""

StepOption = Annotated[int | None, typer.Option("--step", min=0, help="This step only.", show_default=False)]


def list_commits(
    url: Url,
    json_output: Json = False,
    full: Annotated[bool, typer.Option("--full", help="Read every manifest for its fidelity, not only 32.")] = False,
) -> None:
    """List the checkpoints, newest last: those committed, and saves that were cut off."""
    from orchestrator.verified_column import VerifiedColumn
    from storage.inventory import take_inventory

    with ending(url):
        place = open_place(url)
        inventory = take_inventory(place.log, archive_every_h=_archive_every_h(place))
        fidelities = _fidelities(place, inventory, full)
        verified = VerifiedColumn(place.store, inventory, most=None if full else _MANIFESTS_READ)
    sound = [step for step in inventory.steps if step.standing == "usable" and fidelities.get(step.record) != _DAMAGED]
    newest = sound[-1] if sound else None
    rows = [_row(step, fidelities, verified, is_newest=step is newest) for step in inventory.steps]
    rows += [_cut_off_row(save) for save in inventory.cut_off]
    rows.sort(key=lambda row: (row["step"], row["attempt"]))
    if json_output:
        print_json(rows)
    elif rows:
        _print_rows(rows)
        if (waiting := verified.line()) is not None:
            typer.echo(f"{waiting}; `raysume checkpoints verify {url}` checks now", err=True)
    for row in rows:
        if row["standing"] == _DAMAGED:
            text = f"step {row['step']} is damaged, its manifest is not what was committed: a resume passes it over"
            typer.echo(f"{text}; `raysume checkpoints verify {url} {row['step']}` says more", err=True)
    if not inventory.history:
        fail_without(inventory, url, None)


def show(url: Url, step_argument: StepArgument = None, step: StepOption = None, json_output: Json = False) -> None:
    """Show what one checkpoint holds (default: the newest usable one)."""
    from orchestrator.checkpoint_card import card_of, card_text
    from orchestrator.verified_column import verified_facts
    from storage.inventory import take_inventory

    with ending(url):
        place = open_place(url)
        inventory = take_inventory(place.log, with_cut_off=False)
        found = _chosen(inventory, _one_step(step_argument, step))
        if found is None or found.commit is None:
            fail_without(inventory, url, _one_step(step_argument, step))
        verified = verified_facts(place.store, found.key)
        marks = {"standing": found.standing, "marks": _marks(found), "verified": verified}
        card = commit_facts(found.commit) | marks | card_of(place.log, found.commit, inventory)
    if json_output:
        print_json(card)
    else:
        typer.echo(card_text(card))


def verify(
    url: Url,
    step_argument: StepArgument = None,
    step: StepOption = None,
    json_output: Json = False,
    deep: Annotated[
        bool, typer.Option("--deep/--quick", help="Read and check every byte, or only presence, sizes and indexes.")
    ] = True,
    every: Annotated[bool, typer.Option("--all", help="All of them (the default without a step).")] = False,
) -> None:
    """Check checkpoints against everything that was recorded of them (default: all usable ones)."""
    wanted = None if every else _one_step(step_argument, step)
    started_s = time.monotonic()
    with ending(url):
        entries, num_bytes = _verify_all(url, wanted, deep, json_output)
    bad = [entry for entry in entries if not entry["is_good"]]
    if json_output:
        print_json(entries)
    else:
        from orchestrator.report_text import duration, size

        took = duration(time.monotonic() - started_s)
        typer.echo(f"{len(entries) - len(bad)} good, {len(bad)} damaged; {size(num_bytes)} read in {took}")
    if bad:
        raise typer.Exit(CheckpointsCode.CORRUPT)


COMMANDS = (
    ("list", list_commits, _LIST_EPILOG),
    ("show", show, _SHOW_EPILOG),
    ("verify", verify, _VERIFY_EPILOG),
)


def _verify_all(url: str, wanted: int | None, deep: bool, json_output: bool) -> tuple[list[dict[str, Any]], int]:
    from storage.commit_log import CommitLog
    from storage.errors import StorageError
    from storage.inventory import take_inventory
    from storage.metered_store import MeteredStore
    from storage.verify import verify_commit

    place = open_place(url)
    inventory = take_inventory(place.log, with_cut_off=False)
    commits = [commit for commit in inventory.history if wanted in (None, commit.step)]
    unreadable = [found for found in inventory.of("unreadable") if wanted in (None, found.key.step)]
    if not commits and not unreadable:
        if json_output:
            print_json([])
        fail_without(inventory, url, wanted)
    entries: list[dict[str, Any]] = []
    num_bytes = 0
    total = sum(commit.stored_bytes for commit in commits) if deep else 0
    with progress_bar("verifying", total, hidden=json_output or not deep) as advance:
        store = MeteredStore(place.store, advance)
        for commit in commits:
            try:
                report = verify_commit(store, CommitLog(store, None), commit, deep=deep)
            except StorageError as error:
                fail(code_of(error), f"{url}: step {commit.step}: {error}")
            num_bytes += report.bytes_read
            problems = [str(problem) for problem in report.problems]
            entries.append(commit_facts(commit) | {"is_good": report.is_good, "problems": problems})
            if not json_output:
                _print_verified(entries[-1])
    for found in unreadable:
        entries.append(_unreadable_facts(found))
        if not json_output:
            _print_verified(entries[-1])
    return entries, num_bytes


def _print_verified(entry: dict[str, Any]) -> None:
    size = entry["size"] or ""
    typer.echo(f"step {entry['step']:>8}  {'good' if entry['is_good'] else 'DAMAGED'}  {size}".rstrip())
    for problem in entry["problems"]:
        typer.echo(f"    {problem}")


def _unreadable_facts(found: StoredStep) -> dict[str, Any]:
    """As `commit_facts` and verify's own, of a Commit that says nothing."""
    unknown = dict.fromkeys(("time_utc", "age", "bytes", "size", "loss", "metric", "base_step"))
    problems = [f"{found.record}: the commit record cannot be read"]
    return {"step": found.key.step, "attempt": found.key.attempt.number, **unknown} | {
        "is_good": False,
        "problems": problems,
    }


def _one_step(argument: int | None, option: int | None) -> int | None:
    if argument is not None and option not in (None, argument):
        fail(CheckpointsCode.USAGE, f"two different steps were given: {argument} and --step {option}")
    return option if argument is None else argument


def _chosen(inventory: Inventory, step: int | None) -> StoredStep | None:
    """The usable Checkpoint of ``step``; where there is none, one that is out of use."""
    if step is None:
        return next((found for found in inventory.steps if found.is_newest), None)
    of_step = [found for found in inventory.steps if found.key.step == step and found.commit is not None]
    return max(of_step, key=lambda found: (found.standing == "usable", found.key), default=None)


def _fidelities(place: Place, inventory: Inventory, full: bool) -> dict[str, str]:
    """By record name; of the newest Checkpoints only unless ``full``, since each is one more object to read."""
    from concurrent.futures import ThreadPoolExecutor

    from storage.errors import CorruptCheckpoint
    from storage.inventory import fidelity_of

    def look(commit: Commit) -> str:
        try:
            return fidelity_of(place.log.read_manifest(commit))
        except CorruptCheckpoint:
            return _DAMAGED

    commits = [step.commit for step in inventory.steps if step.commit is not None]
    if not full:
        commits = commits[-_MANIFESTS_READ:]
    with ThreadPoolExecutor(8, thread_name_prefix="manifests") as pool:
        return {commit.object_key: said for commit, said in zip(commits, pool.map(look, commits), strict=True)}


def _archive_every_h(place: Place) -> float | None:
    """The setting with which the newest Checkpoint was saved; None where nothing says it."""
    from storage.errors import StorageError

    newest = place.log.latest()
    if newest is None:
        return None
    try:
        config = place.log.read_manifest(newest).metadata.get("config")
    except StorageError:  # `verify` names what is wrong with it; here it only costs a mark
        return None
    checkpoint = config.get("checkpoint") if isinstance(config, dict) else None
    value = checkpoint.get("archive_every_h") if isinstance(checkpoint, dict) else None
    return float(value) if isinstance(value, int | float) and value > 0 else None


def _marks(step: StoredStep) -> list[str]:
    marks = [step.standing] if step.standing != "usable" else []
    return [
        *marks,
        *(["newest"] if step.is_newest else []),
        *(["best"] if step.is_best else []),
        *(["archived"] if step.is_archived else []),
    ]


def _row(step: StoredStep, fidelities: dict[str, str], verified: VerifiedColumn, *, is_newest: bool) -> dict[str, Any]:
    fidelity = fidelities.get(step.record)
    is_damaged = fidelity == _DAMAGED and step.standing == "usable"
    marks = _marks(replace(step, is_newest=is_newest))
    facts = _unreadable_facts(step) if step.commit is None else commit_facts(step.commit)
    reason = f"{step.quarantine.key}: {step.quarantine.reason}" if step.quarantine else None
    return {name: value for name, value in facts.items() if name not in ("is_good", "problems")} | {
        "standing": _DAMAGED if is_damaged else step.standing,
        "marks": [_DAMAGED, *marks] if is_damaged else marks,
        "fidelity": None if fidelity == _DAMAGED else fidelity,
        "verified": verified.of(step.key),
        "reason": reason,
    }


def _cut_off_row(save: CutOffSave) -> dict[str, Any]:
    from orchestrator.report_text import size

    unknown = dict.fromkeys(("time_utc", "age", "loss", "metric", "base_step", "fidelity", "verified", "reason"))
    return (
        {"step": save.key.step, "attempt": save.key.attempt.number}
        | unknown
        | {
            "bytes": save.stored_bytes,
            "size": size(save.stored_bytes),
            "standing": "cut off",
            "marks": ["cut off"],
        }
    )


def _print_rows(rows: list[dict[str, Any]]) -> None:
    titles = ("step", "attempt", "size", "committed (UTC)", "age", "loss", "metric", "fidelity", "verified", "")
    table: list[tuple[str, ...]] = [titles]
    for row in rows:
        numbers = ["-" if row[name] is None else f"{row[name]:.4g}" for name in ("loss", "metric")]
        when = (row["time_utc"] or "-")[:19].replace("T", " ")
        shown = (row["step"], row["attempt"], row["size"], when, row["age"], *numbers, row["fidelity"], row["verified"])
        table.append((*("-" if cell is None else str(cell) for cell in shown), ", ".join(row["marks"])))
    widths = [max(len(line[column]) for line in table) for column in range(len(titles))]
    for line in table:
        cells = [cell.rjust(width) for cell, width in zip(line[:-1], widths, strict=False)]
        typer.echo("  ".join([*cells, line[-1]]).rstrip())
    for row in rows:
        if row["reason"]:
            typer.echo(f"step {row['step']} is quarantined: {row['reason']}")
