"""`raysume doctor`: one look at a Run's place: what is wrong, and what to do. Reads only, but for --probe-store."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from orchestrator.cli_checkpoints_place import CheckpointsCode, Json, Url, ending, fail, open_place, print_json

__all__ = ["DOCTOR_EPILOG", "doctor"]

DOCTOR_EPILOG = """[bold]Examples[/bold]

  raysume doctor ./outputs/first-run

  raysume doctor s3://bucket/run --deep

  raysume doctor s3://bucket/run --newest 5 --json

[bold]Exit codes[/bold]

  0 no damage, 10 URL refused, 14 stopped, 16 storage away, 20 nothing of a run is here, 21 damaged
"""


def doctor(
    url: Url,
    deep: Annotated[bool, typer.Option("--deep", help="Read, check and decode every byte.")] = False,
    newest: Annotated[
        int | None, typer.Option(min=1, help="Examine only the newest so many checkpoints.", show_default=False)
    ] = None,
    watch_s: Annotated[
        float, typer.Option(min=0.0, help="Longest watching of a driver's lease that may be stale.")
    ] = 15.0,
    probe_store: Annotated[
        bool, typer.Option("--probe-store", help="Also try out what the store can do: WRITES and removes objects.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Examine a run's directory or bucket: what is damaged, what a resume would use, what to run next."""
    from orchestrator.doctor_text import diagnosis_facts, diagnosis_text

    with ending(url):
        diagnosis = _diagnose(url, deep, newest, watch_s, quiet=json_output)
        facts = _store_facts(url) if probe_store else None
    if json_output:
        print_json(diagnosis_facts(diagnosis, url) | {"store": facts})
    else:
        typer.echo(diagnosis_text(diagnosis, url))
        if facts is not None:
            typer.echo("\nThe store")
            for name, value in facts.items():
                typer.echo(f"  {name:<28}{value}")
    if diagnosis.is_empty:
        fail(CheckpointsCode.NOT_FOUND, f"{url} holds nothing of a run; is it the root of a run (run.url)?")
    if diagnosis.is_damaged:
        raise typer.Exit(CheckpointsCode.CORRUPT)


def _diagnose(url: str, deep: bool, newest: int | None, watch_s: float, *, quiet: bool) -> Any:
    import sys

    from orchestrator.doctor import DoctorWish, diagnose

    place = open_place(url)
    wish = DoctorWish(deep=deep, newest=newest, watch_s=watch_s)

    def say(sighting: object, limit_s: float) -> None:
        typer.echo(f"watching for at most {limit_s:g} s: {sighting}", err=True)

    if quiet or not sys.stderr.isatty():
        return diagnose(place.store, wish, on_wait=None if quiet else say)
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("examining", total=None)
        return diagnose(
            place.store,
            wish,
            on_total=lambda total: bars.update(task, total=total or None),
            progress=lambda num_bytes: bars.advance(task, num_bytes),
            on_wait=say,
        )


def _store_facts(url: str) -> dict[str, Any]:
    from storage.open_store import open_store
    from storage.store_facts import learn_store

    return learn_store(open_store(url)).as_json()
