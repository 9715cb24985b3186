"""`raysume checkpoints prune` and `quarantine`: show first, ask, then change; never beside a living driver unasked."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli_checkpoints_place import (
    CheckpointsCode,
    DryRun,
    Force,
    Json,
    Place,
    Url,
    Yes,
    commit_facts,
    ending,
    fail,
    fail_without,
    may_go_on,
    open_place,
    print_json,
    refuse_beside_a_driver,
)

if TYPE_CHECKING:
    from storage.inventory import Inventory, StoredStep
    from storage.pruning import PruneResult, PruneWish

__all__ = ["COMMANDS", "prune", "quarantine", "seconds_of"]

_PRUNE_EPILOG = """[bold]Examples[/bold]

  raysume checkpoints prune ./outputs/first-run --keep 3 --dry-run

  raysume checkpoints prune s3://bucket/run --keep 5 --older-than 7d --yes

  raysume checkpoints prune s3://bucket/run --void --orphans

[bold]What stays[/bold]

  The newest one, the best one by metric, and the newest --keep ones, always. With --older-than the others go only
  once they are that old.
"""
_QUARANTINE_EPILOG = """[bold]Examples[/bold]

  raysume checkpoints quarantine ./outputs/first-run 40 --reason "loss spiked"

  raysume checkpoints quarantine ./outputs/first-run 40 --lift
"""
_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def seconds_of(text: str) -> float:
    """``90s``, ``15m``, ``12h``, ``7d``, ``2w`` in seconds. Raises typer.BadParameter."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|m|min|h|d|w)\s*", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no duration: write e.g. 90s, 15m, 12h, 7d or 2w")
    return float(match[1]) * _UNITS[match[2]]


def prune(
    url: Url,
    keep: Annotated[int | None, typer.Option(min=1, help="Give up all but the newest so many.")] = None,
    archive_every_h: Annotated[
        float | None, typer.Option(min=0.0, help="Besides, keep one of every so many hours.", show_default=False)
    ] = None,
    older_than: Annotated[str | None, typer.Option(help="Give up only what is older, e.g. 12h, 7d.")] = None,
    void: Annotated[bool, typer.Option("--void", help="Also those a newer attempt has made void.")] = False,
    orphans: Annotated[bool, typer.Option("--orphans", help="Also saves that were never committed.")] = False,
    grace: Annotated[str, typer.Option(help="With --orphans: only those beyond hope for so long.")] = "1h",
    yes: Yes = False,
    dry_run: DryRun = False,
    force: Force = False,
    json_output: Json = False,
) -> None:
    """Delete checkpoints by hand, as retention would: un-commit first, then the bytes. Never the newest one."""
    from storage.pruning import PruneWish

    if keep is None and archive_every_h is None and older_than is None and not (void or orphans):
        raise typer.BadParameter("say what may go: --keep, --older-than, --archive-every-h, --void or --orphans")
    wish = PruneWish(
        keep=keep,
        archive_every_h=archive_every_h,
        older_than_s=None if older_than is None else seconds_of(older_than),
        void=void,
        orphans=orphans,
        grace_s=seconds_of(grace),
    )
    with ending(url):
        _prune(url, wish, yes=yes, dry_run=dry_run, force=force, quiet=json_output)


def quarantine(
    url: Url,
    step: Annotated[int, typer.Argument(min=0, help="Step to take out of use.", show_default=False)],
    reason: Annotated[str | None, typer.Option(help="Why; shown whenever it is passed over.")] = None,
    lift: Annotated[bool, typer.Option("--lift", help="Put it back into use.")] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    force: Force = False,
    json_output: Json = False,
) -> None:
    """Take a checkpoint out of use without deleting it, or put it back with --lift."""
    if lift == (reason is not None):
        raise typer.BadParameter("give either --reason TEXT or --lift")
    with ending(url):
        place = open_place(url)
        inventory = _inventory(place)
        chosen = _to_lift(inventory, url, step) if lift else _to_take_out(inventory, url, step)
        plan = _lift_plan(chosen) if lift else _take_out_plan(inventory, chosen, reason or "")
        if not may_go_on(plan, yes=yes, dry_run=dry_run, quiet=json_output):
            if json_output:
                print_json({"changed": False, "steps": [_step_facts(found) for found in chosen]})
            return
        refuse_beside_a_driver(place.store, force=force)
        for found in chosen:
            _set_standing(place, found, None if lift else reason)
    if json_output:
        print_json({"changed": True, "steps": [_step_facts(found) for found in chosen]})
    else:
        typer.echo(f"step {step} is {'back in use' if lift else 'quarantined'}")


COMMANDS = (("prune", prune, _PRUNE_EPILOG), ("quarantine", quarantine, _QUARANTINE_EPILOG))


def _inventory(place: Place, *, with_cut_off: bool = False) -> Inventory:
    from storage.inventory import take_inventory

    return take_inventory(place.log, with_cut_off=with_cut_off)


def _prune(url: str, wish: PruneWish, *, yes: bool, dry_run: bool, force: bool, quiet: bool) -> None:
    from storage.overlay_store import OverlayStore
    from storage.pruning import prune as carry_out

    place = open_place(url)
    plan = carry_out(OverlayStore(place.store), wish, now_s=time.time())
    if not plan.kept:
        fail_without(_inventory(place, with_cut_off=True), url, None)
    if plan.is_empty:
        if quiet:
            print_json(_plan_facts(plan) | {"changed": False})
        else:
            typer.echo(f"nothing to delete; {len(plan.kept)} checkpoints stay")
        return
    _require_a_whole_one(place, plan, force=force)
    if not may_go_on(_plan_lines(plan), yes=yes, dry_run=dry_run, quiet=quiet):
        if quiet:
            print_json(_plan_facts(plan) | {"changed": False})
        return
    refuse_beside_a_driver(place.store, force=force)
    done = carry_out(place.store, wish, now_s=time.time())
    if quiet:
        print_json(_plan_facts(done) | {"changed": True})
    else:
        from orchestrator.report_text import size

        typer.echo(f"deleted; {size(done.stored_bytes)} given back, {len(done.kept)} checkpoints stay")


def _require_a_whole_one(place: Place, plan: PruneResult, *, force: bool) -> None:
    """Deleting the good ones and keeping a damaged one would lose the run."""
    from storage.verify import verify_commit

    newest = plan.kept[-1]
    report = verify_commit(place.store, place.log, newest, deep=False)
    if report.is_good:
        return
    text = f"step {newest.step}, the newest that would stay, is damaged: {report.problems[0]}"
    if not force:
        fail(CheckpointsCode.CORRUPT, f"nothing was deleted: {text}; quarantine it first, or add --force")
    typer.echo(f"WARNING: {text}", err=True)


def _plan_lines(plan: PruneResult) -> list[str]:
    from orchestrator.report_text import size

    lines = []
    for title, commits in (("delete", plan.doomed), ("delete (void)", plan.void)):
        for facts in map(commit_facts, commits):
            lines.append(f"{title} step {facts['step']}, attempt {facts['attempt']}, {facts['size']}, {facts['age']}")
    for piece in plan.orphans:
        text = f"{len(piece.keys)} objects, {size(piece.stored_bytes)}"
        lines.append(f"delete (never committed) step {piece.key.step}, attempt {piece.key.attempt.number}, {text}")
    lines.append(f"{size(plan.stored_bytes)} in all; what stays: step {', '.join(str(one.step) for one in plan.kept)}")
    return lines


def _plan_facts(plan: PruneResult) -> dict[str, Any]:
    return {
        "deleted": [commit_facts(commit) for commit in plan.doomed],
        "void": [commit_facts(commit) for commit in plan.void],
        "orphans": [
            {"step": piece.key.step, "attempt": piece.key.attempt.number, "bytes": piece.stored_bytes}
            for piece in plan.orphans
        ],
        "kept": [commit.step for commit in plan.kept],
        "bytes": plan.stored_bytes,
    }


def _to_take_out(inventory: Inventory, url: str, step: int) -> list[StoredStep]:
    found = [one for one in inventory.steps if one.key.step == step and one.standing in ("usable", "unreadable")]
    if not found:
        out = [one for one in inventory.steps if one.key.step == step]
        if out:
            fail(CheckpointsCode.NOT_FOUND, f"{url}: step {step} is not in use: it is {out[-1].standing} already")
        fail_without(inventory, url, step)
    return found


def _to_lift(inventory: Inventory, url: str, step: int) -> list[StoredStep]:
    found = [one for one in inventory.of("quarantined") if one.key.step == step]
    if not found:
        steps = ", ".join(str(one.key.step) for one in inventory.of("quarantined")) or "none"
        fail(CheckpointsCode.NOT_FOUND, f"{url}: step {step} is not quarantined (quarantined steps: {steps})")
    return found


def _take_out_plan(inventory: Inventory, chosen: list[StoredStep], reason: str) -> list[str]:
    gone = {found.key for found in chosen}
    left = [commit.step for commit in inventory.history if commit.step_key not in gone]
    then = f"a resume will then use step {left[-1]}" if left else "NOTHING is left to resume from then"
    return [*(f"quarantine step {one.key.step}, attempt {one.key.attempt.number}: {reason}" for one in chosen), then]


def _lift_plan(chosen: list[StoredStep]) -> list[str]:
    return [
        f"put step {one.key.step}, attempt {one.key.attempt.number} back into use; it was quarantined because: "
        f"{one.quarantine.reason if one.quarantine else 'unknown'}"
        for one in chosen
    ]


def _set_standing(place: Place, found: StoredStep, reason: str | None) -> None:
    from storage.events import utc_text
    from storage.keys import quarantine_key

    if reason is None:
        place.store.delete([quarantine_key(found.key)])
    else:
        place.log.quarantine(found.key, found.record, f"by hand: {reason}", utc_text(time.time()))


def _step_facts(found: StoredStep) -> dict[str, Any]:
    return {"step": found.key.step, "attempt": found.key.attempt.number, "was": found.standing}
