"""`raysume drill`: turns its arguments into a plan; the drill does the rest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli_start import exit_code_of, load

if TYPE_CHECKING:
    from orchestrator.chaos import ChaosAction
    from orchestrator.config import RunConfig

__all__ = ["DRILL_EPILOG", "drill"]

_MAX_STEPS = 80  # of a drill whose steps nobody chose: a check of some minutes, not a training
_MAX_NODES = 4

DRILL_EPILOG = """[bold]Examples[/bold]

  raysume drill clusters/local/drill.yaml

  raysume drill run.yaml --steps 60 --faults 8 --seed 3

  raysume drill run.yaml --local-nodes 3 --chaos kill-node@20,add-node@20,drain-node@40:10s

  raysume drill run.yaml --loop train:train reproducible=true

[bold]Where the runs differ[/bold]

  Two causes are the commonest. A model with dropout drops other units once the number of workers has changed: drill
  it with reproducible=true. And a loop that keeps something outside of its state loses it in a fresh process: give it
  to make_trackers.

[bold]Exit codes[/bold]

  0 the same run; 25 not the same, or nothing was proven; 10 configuration; 14 stopped; else that of the run that
  failed, see docs/exit-codes.md. What is compared, and how exactly: docs/drill.md
"""


def drill(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.sub=value, over the file; values are YAML or JSON.")
    ] = None,
    local_nodes: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Nodes of the local cluster.", show_default="world.max_workers, at most 4"),
    ] = None,
    chaos: Annotated[
        str | None, typer.Option(help="Faults of the second run, e.g. kill-node@40,add-node@40.", show_default=False)
    ] = None,
    faults: Annotated[
        int | None, typer.Option(min=1, help="Draw so many faults.", show_default="6 where --chaos is not given")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the faults that are drawn.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of both runs.", show_default=f"run.steps, at most {_MAX_STEPS}")
    ] = None,
    loop: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="A training loop of your own, importable from this directory."),
    ] = None,
    loop_config: Annotated[
        str | None, typer.Option(metavar="JSON", help="What that loop finds in session.loop_config.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="New directory for both runs and the result.", show_default="outputs/drill-NAME")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the checkpoints of a drill that was passed.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print drill.json to stdout, nothing else.")] = False,
) -> None:
    """Prove that an interrupted run is the uninterrupted one: train twice, break one, compare step by step."""
    if chaos is not None and faults is not None:
        raise typer.BadParameter("chooses the faults itself: leave one of the two out", param_hint="--faults")

    def drive() -> int:
        from orchestrator.drill import choose_folder, run_drill
        from orchestrator.drill_runs import DrillPlan
        from orchestrator.user_loop import read_loop

        user_loop = read_loop(loop, loop_config)
        changes = list(overrides or [])
        loaded = load(config, changes, has_loop=user_loop.reference is not None)
        changes.append(f"run.steps={steps or min(loaded.run.steps, _MAX_STEPS)}")
        loaded = load(config, changes, has_loop=user_loop.reference is not None)
        user_loop.require()
        num_nodes = local_nodes or min(loaded.world.max_workers, _MAX_NODES)
        plan = DrillPlan(
            config=loaded,
            config_path=config.resolve(),
            overrides=tuple(changes),
            num_nodes=num_nodes,
            actions=_actions(loaded, num_nodes, chaos, faults, seed),
            folder=choose_folder(out, loaded.run.name),
            loop_options=user_loop.options(),
        )
        return run_drill(plan, json_output=json_output, is_kept=keep)

    raise typer.Exit(exit_code_of(drive))


def _actions(
    config: RunConfig, num_nodes: int, chaos: str | None, faults: int | None, seed: int
) -> tuple[ChaosAction, ...]:
    from orchestrator.chaos import parse_chaos
    from orchestrator.drill_faults import NUM_FAULTS, draw_faults

    if chaos is not None:
        return parse_chaos(chaos)
    world = config.world
    return draw_faults(
        num_steps=config.run.steps,
        num_workers=min(world.max_workers, num_nodes * (world.workers_per_node or 1)),
        num_faults=faults or NUM_FAULTS,
        seed=seed,
    )
