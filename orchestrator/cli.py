"""The command line: turns arguments into calls, errors into one message, endings into exit codes. Decides nothing.

Ray, torch and the configuration models are imported inside the commands that need them, so that help comes at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli_checkpoints import checkpoints
from orchestrator.cli_control import SAVE_EPILOG, SCALE_EPILOG, STOP_EPILOG, save, scale, stop
from orchestrator.cli_data import data
from orchestrator.cli_doctor import DOCTOR_EPILOG, doctor
from orchestrator.cli_drill import DRILL_EPILOG, drill
from orchestrator.cli_explain import EXPLAIN_EPILOG, explain
from orchestrator.cli_start import exit_code_of, load
from orchestrator.exit_codes import ExitCode

if TYPE_CHECKING:
    from orchestrator.config import RunConfig
    from orchestrator.user_loop import UserLoop

__all__ = ["app", "main"]

app = typer.Typer(
    name="raysume",
    help="Keeps long PyTorch pretraining runs alive on Ray clusters whose machines come and go.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data, name="data")
app.add_typer(checkpoints, name="checkpoints")
app.command("doctor", epilog=DOCTOR_EPILOG)(doctor)
app.command("explain", epilog=EXPLAIN_EPILOG)(explain)
app.command("drill", epilog=DRILL_EPILOG)(drill)
app.command("scale", epilog=SCALE_EPILOG)(scale)
app.command("save", epilog=SAVE_EPILOG)(save)
app.command("stop", epilog=STOP_EPILOG)(stop)

_RUN_EPILOG = """[bold]Examples[/bold]

  raysume run clusters/local/run.yaml --local-nodes 4

  raysume run clusters/local/run.yaml run.steps=200 optim.lr=1e-3

  raysume run clusters/local/run.yaml --local-nodes 4 --chaos kill-node@40,add-node@80

  raysume run run.yaml --resume 120

  raysume run run.yaml --local-nodes 2 --loop train:train --loop-config '{"width": 64}'

  ray job submit --working-dir . -- python -m orchestrator run run.yaml

[bold]Exit codes[/bold]

  0 finished, 10 configuration, 11 training code failed, 12 too many failures, 13 preempted, 14 stopped, 15 too few
  workers or every node going away, 16 storage away, 17 last save failed, 18 another driver holds the run,
  19 a fault of raysume

[bold]Chaos[/bold]

  kill-node@S, add-node@S, drain-node@S:20s, cut-node@S, slow-node@S, disk-full@S, kill-worker@S, stop-worker@S,
  oom-worker@S, raise-in-worker@S, kill-keeper@S, kill-coordinator@S, kill-driver@S, restart-head@S,
  store-outage@S:60s, scale:3@S

  kill-node:2@S hits node 2; kill-node@during-save, @during-load, @during-regroup: when that begins; see docs/chaos.md
"""


def main() -> None:
    """Entry point of `raysume` and `python -m orchestrator`."""
    app()


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        typer.echo(f"raysume {version('raysume')}")
        raise typer.Exit


@app.callback(epilog="Start here:  raysume run clusters/local/run.yaml --local-nodes 4")
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(epilog=_RUN_EPILOG)
def run(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.sub=value, over the file; values are YAML or JSON.")
    ] = None,
    local_nodes: Annotated[
        int | None, typer.Option(min=1, max=64, help="Start a cluster of this many nodes on this machine for the run.")
    ] = None,
    chaos: Annotated[
        str | None, typer.Option(help="Faults to inject into the local cluster, e.g. kill-node@40,add-node@80.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="auto, none, a step, or the URL of another run (same as run.resume=...).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run and of chaos targets (same as seed=...).")] = None,
    loop: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="A training loop of your own, importable from this directory."),
    ] = None,
    loop_config: Annotated[
        str | None, typer.Option(metavar="JSON", help="What that loop finds in session.loop_config.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print summary.json to stdout, nothing else.")] = False,
    ray_address: Annotated[str | None, typer.Option(hidden=True)] = None,
    events_file: Annotated[Path | None, typer.Option(hidden=True)] = None,
    under_supervisor: Annotated[bool, typer.Option(hidden=True)] = False,
    asked: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train: start a run, or go on with it from its newest checkpoint."""
    changes = list(overrides or [])
    if resume is not None:
        changes.append(f"run.resume={resume}")
    if seed is not None:
        changes.append(f"seed={seed}")
    if chaos is not None and local_nodes is None:
        raise typer.BadParameter(
            "needs --local-nodes: faults are injected into a local cluster only", param_hint="--chaos"
        )

    def drive() -> int:
        from orchestrator.chaos import check_targets, parse_chaos
        from orchestrator.user_loop import read_loop

        user_loop = read_loop(loop, loop_config)
        loaded = load(config, changes, has_loop=user_loop.reference is not None)
        if chaos is not None:
            # A schedule that cannot be is an error even where nothing is left to run.
            check_targets(parse_chaos(chaos), local_nodes or 0)
        if not under_supervisor:
            user_loop.require()  # nor is a loop that is not there to be found missing only once steps are added
        nodes = () if local_nodes is None else ("--local-nodes", str(local_nodes))
        words = (str(config), *changes, *nodes, *user_loop.options())
        from orchestrator.finished import finished_summary, show_finished

        summary = None if under_supervisor else finished_summary(loaded)
        if summary is not None:
            show_finished(summary, loaded, sys.stdout, json_output=json_output, asked=words)
            return ExitCode.SUCCESS
        if not under_supervisor:
            from orchestrator.early_refusals import refuse_early

            refuse_early(loaded)
        if local_nodes is not None:
            return _run_locally(config, loaded, changes, local_nodes, chaos, json_output, user_loop, words)
        from orchestrator.launch import run_driver
        from orchestrator.options import DriverOptions

        options = DriverOptions(
            ray_address=ray_address,
            events_path=events_file,
            json_output=json_output,
            show_progress=not under_supervisor,
            asked=words if asked is None else tuple(json.loads(asked)),
        )
        return run_driver(loaded, options, train_loop=user_loop.reference, loop_config=user_loop.config)

    raise typer.Exit(exit_code_of(drive))


def _run_locally(
    path: Path,
    config: RunConfig,
    overrides: list[str],
    num_nodes: int,
    chaos: str | None,
    json_output: bool,
    user_loop: UserLoop,
    asked: tuple[str, ...],
) -> int:
    from orchestrator.chaos import parse_chaos

    actions = parse_chaos(chaos) if chaos is not None else ()
    # Before ray is imported by anything: it reads its environment then.
    from orchestrator.local_cluster import prepare_environment

    prepare_environment()
    from orchestrator.driver_record import events_path_of
    from orchestrator.run_identity import find_run_id
    from orchestrator.supervisor import SupervisorPlan, supervise
    from storage.open_store import open_store

    run_id = find_run_id(open_store(config.run.url, config.checkpoint.store), config)
    plan = SupervisorPlan(
        config=config,
        config_path=path.resolve(),
        overrides=tuple(overrides),
        num_nodes=num_nodes,
        actions=actions,
        events_path=events_path_of(config.run.url, run_id),
        run_id=run_id,
        json_output=json_output,
        show_progress=not json_output,
        loop_options=user_loop.options(),
        asked=asked,
    )
    return supervise(plan)
