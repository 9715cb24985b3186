"""`raysume explain`: why there was, or was not, a save at a step. Reads events; loads neither Ray nor torch."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli_checkpoints_place import CheckpointsCode, Json, ending, fail, print_json
from orchestrator.cli_control import Run, open_run

__all__ = ["EXPLAIN_EPILOG", "explain"]

EXPLAIN_EPILOG = """[bold]Examples[/bold]

  raysume explain ./outputs/first-run 40

  raysume explain s3://bucket/run 1200 --json

  raysume explain run.yaml 40

A run that goes on copies its events to object storage every 10 s: what is newer is not seen there yet.

[bold]Exit codes[/bold]

  0 explained, 10 URL refused, 14 stopped, 16 storage away, 20 no events are there, or no such step was made
"""


def explain(
    run: Run,
    step: Annotated[int, typer.Argument(metavar="STEP", min=1, help="Step to ask about.", show_default=False)],
    json_output: Json = False,
) -> None:
    """Say why there was, or was not, a save at a step: who asked, what was held back, what a fault would have cost."""
    from dataclasses import asdict

    from orchestrator.event_tail import events_in
    from orchestrator.explain import explain as explain_step
    from orchestrator.explain_text import explanation_text
    from storage.errors import ObjectMissing
    from storage.keys import EVENTS

    with ending(run):
        url, store = open_run(run)
        try:
            data = store.get(EVENTS)
        except ObjectMissing:
            fail(CheckpointsCode.NOT_FOUND, f"{url} holds no {EVENTS}; is it the root of a run (run.url)?")
    explanation = explain_step(events_in(data), step)
    if explanation.why_nothing is not None:
        fail(CheckpointsCode.NOT_FOUND, f"{url} has nothing to say of step {step}: {explanation.why_nothing}")
    if json_output:
        print_json(asdict(explanation))
    else:
        typer.echo(explanation_text(explanation))
