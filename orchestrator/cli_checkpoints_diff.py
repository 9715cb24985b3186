"""`raysume checkpoints diff`: what differs between two Checkpoints, of one run or of two. Read only."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli_checkpoints_place import (
    CheckpointsCode,
    Json,
    Place,
    ending,
    fail,
    fail_without,
    open_place,
    print_json,
    progress_bar,
)

if TYPE_CHECKING:
    from storage.diff import ManifestDiff
    from storage.manifest import Manifest
    from storage.value_diff import TensorDifference

__all__ = ["COMMANDS", "diff"]

_SHOWN = 40

_DIFF_EPILOG = """[bold]Examples[/bold]

  raysume checkpoints diff ./outputs/first-run 40 80

  raysume checkpoints diff ./outputs/first-run 40 80 --values

  raysume checkpoints diff s3://bucket/run@40 ./outputs/other@40 --values --json
"""


def diff(
    what: Annotated[list[str], typer.Argument(metavar="[URL] A B", help="A and B: steps of URL, or URL@STEP each.")],
    values: Annotated[bool, typer.Option("--values", help="Compare the values too: reads both checkpoints.")] = False,
    only: Annotated[str, typer.Option(help="With --values: tensors matching this pattern, e.g. model.*")] = "*",
    json_output: Json = False,
) -> None:
    """Compare two checkpoints: metadata, layout and, with --values, every element. Ends with 0 either way."""
    from storage.diff import diff_manifests

    (url_a, step_a), (url_b, step_b) = _sides(what)
    a, b = _open_side(url_a, step_a), _open_side(url_b, step_b)
    found = diff_manifests(a.manifest, b.manifest)
    compared = _compare(a, b, found, only, json_output) if values else None
    if json_output:
        print_json(_facts(found, compared))
    else:
        _print(found, compared)


COMMANDS = (("diff", diff, _DIFF_EPILOG),)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    place: Place
    manifest: Manifest


def _sides(what: list[str]) -> tuple[tuple[str, int], tuple[str, int]]:
    if len(what) == 3 and what[1].isdecimal() and what[2].isdecimal():
        return (what[0], int(what[1])), (what[0], int(what[2]))
    if len(what) == 2:
        parts = [one.rpartition("@") for one in what]
        if all(url and step.isdecimal() for url, _, step in parts):
            return (parts[0][0], int(parts[0][2])), (parts[1][0], int(parts[1][2]))
    raise typer.BadParameter("write either URL STEP STEP, or URL@STEP URL@STEP")


def _open_side(url: str, step: int) -> _Side:
    """The Checkpoint of ``step``; one out of use is taken where no usable one is there."""
    from storage.inventory import take_inventory

    with ending(url):
        place = open_place(url)
        inventory = take_inventory(place.log, with_cut_off=False)
        found = [one for one in inventory.steps if one.key.step == step and one.commit is not None]
        if not found:
            fail_without(inventory, url, step)
        chosen = max(found, key=lambda one: (one.standing == "usable", one.key))
        if chosen.standing != "usable":
            typer.echo(f"note: step {step} of {url} is {chosen.standing}", err=True)
        if chosen.commit is None:
            fail(CheckpointsCode.CORRUPT, f"{url}: {chosen.record} cannot be read")
        return _Side(place=place, manifest=place.log.read_manifest(chosen.commit))


def _compare(a: _Side, b: _Side, found: ManifestDiff, only: str, quiet: bool) -> list[TensorDifference]:
    from fnmatch import fnmatchcase

    from storage.metered_store import MeteredStore
    from storage.value_diff import CheckpointValues, compare_tensor

    names = [name for name in found.common if fnmatchcase(name, only)]
    total = a.manifest.stored_bytes + b.manifest.stored_bytes
    with (
        ending(f"{a.place.url} and {b.place.url}"),
        progress_bar("comparing", total, hidden=quiet or only != "*") as advance,
    ):
        before = CheckpointValues(MeteredStore(a.place.store, advance), a.manifest)
        after = CheckpointValues(MeteredStore(b.place.store, advance), b.manifest)
        return [compare_tensor(name, before, after) for name in names]


def _facts(found: ManifestDiff, compared: list[TensorDifference] | None) -> dict[str, Any]:
    facts: dict[str, Any] = {name: list(value) for name, value in asdict(found).items() if name != "common"}
    facts["common"] = len(found.common)
    facts["values"] = None
    if compared is not None:
        facts["values"] = [_finite(asdict(one) | {"is_equal": one.is_equal}) for one in compared]
        facts["is_equal"] = found.has_same_layout and all(one.is_equal for one in compared)
    return facts


def _finite(told: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    return {
        name: str(value) if isinstance(value, float) and value - value != 0 else value for name, value in told.items()
    }


def _print(found: ManifestDiff, compared: list[TensorDifference] | None) -> None:
    for title, lines in (
        ("metadata", found.metadata),
        ("plain state", found.state),
        ("only in B", found.added),
        ("only in A", found.removed),
        ("reshaped", found.reshaped),
        ("retyped", found.retyped),
        ("kept otherwise", found.releveled),
    ):
        if lines:
            typer.echo(f"{title} ({len(lines)})")
            for line in lines[:_SHOWN]:
                typer.echo(f"  {line}")
            if len(lines) > _SHOWN:
                typer.echo(f"  and {len(lines) - _SHOWN} more (--json lists all)")
    typer.echo(f"{len(found.common)} tensors have the same name and shape")
    if compared is None:
        return
    width = max((len(one.name) for one in compared), default=0)
    for one in compared:
        if one.is_equal:
            continue
        odd = f", {one.num_not_finite} not finite" if one.num_not_finite else ""
        typer.echo(
            f"  {one.name:<{width}}  max abs {one.max_abs:.3g}, relative L2 {one.relative_l2:.3g}, "
            f"{one.num_different} of {one.num_elements} differ{odd}"
        )
    typer.echo(f"{sum(one.is_equal for one in compared)} of {len(compared)} are equal to the bit")
