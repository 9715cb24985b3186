"""`raysume scale`, `save` and `stop`: ask the driver of a running Run, from any machine that reaches the Run's store.

Ray and torch are not loaded. What is asked and answered goes through small objects below the Run's URL (asking).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli_checkpoints_place import CheckpointsCode, Json, ending, fail, print_json

if TYPE_CHECKING:
    from orchestrator.asking import Answer
    from orchestrator.requests import Reply, WishKind
    from storage.lease_watch import DriverSighting
    from storage.object_store import ObjectStore

__all__ = ["SAVE_EPILOG", "SCALE_EPILOG", "STOP_EPILOG", "Run", "open_run", "save", "scale", "stop"]

_CODES = """
[bold]Exit codes[/bold]

  0 accepted, or with --wait done; 10 URL refused; 14 Ctrl-C; 16 storage away; 20 no run is there; 22 no driver is
  alive, or it ended without an answer; 23 the driver refused; 24 no answer, or with --wait not done, within --timeout
"""
SCALE_EPILOG = f"""[bold]Examples[/bold]

  raysume scale ./outputs/first-run --workers 3

  raysume scale s3://bucket/run --workers 16 --wait --timeout 600

  raysume scale run.yaml --workers 2 --json
{_CODES}"""
SAVE_EPILOG = f"""[bold]Examples[/bold]

  raysume save ./outputs/first-run

  raysume save s3://bucket/run --wait
{_CODES}"""
STOP_EPILOG = f"""[bold]Examples[/bold]

  raysume stop s3://bucket/run --wait

  raysume stop run.yaml
{_CODES}"""

Run = Annotated[
    str, typer.Argument(metavar="RUN", help="Root directory or URL of the run, or its YAML file.", show_default=False)
]
Wait = Annotated[bool, typer.Option("--wait", help="Until it is done, not only accepted.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.0, help="Longest wait for the driver, in seconds.")]


def scale(
    run: Run,
    workers: Annotated[int, typer.Option("--workers", "-w", min=1, help="Workers wanted from now on.")],
    wait: Wait = False,
    timeout: Timeout = 120.0,
    json_output: Json = False,
) -> None:
    """Give a running run another number of workers: no step is lost, a restart keeps it."""
    _carry_out(run, "scale", workers, wait=wait, timeout_s=timeout, is_json=json_output)


def save(run: Run, wait: Wait = False, timeout: Timeout = 120.0, json_output: Json = False) -> None:
    """Let a running run save a checkpoint now."""
    _carry_out(run, "save", None, wait=wait, timeout_s=timeout, is_json=json_output)


def stop(run: Run, wait: Wait = False, timeout: Timeout = 120.0, json_output: Json = False) -> None:
    """Let a running run save its newest step and end, as Ctrl-C does; the same `raysume run` goes on from there."""
    _carry_out(run, "stop", None, wait=wait, timeout_s=timeout, is_json=json_output)


def _carry_out(run: str, wish: WishKind, workers: int | None, *, wait: bool, timeout_s: float, is_json: bool) -> None:
    from orchestrator.asking import Asking, DriverGone, NoDriver, NotARun

    with ending(run):
        url, store = open_run(run)

    def say(line: str) -> None:
        if not is_json:
            typer.echo(line, err=True)

    def on_watch(sighting: DriverSighting, limit_s: float) -> None:
        say(f"watching for at most {limit_s:g} s whether a driver lives: {sighting}")

    def on_news(reply: Reply) -> None:
        if reply.state in ("taken", "accepted"):
            say(f"driver {reply.driver}: {reply.state}{f': {reply.reason}' if reply.reason else ''}")

    with ending(url):
        asking = Asking(store, on_news=on_news, on_watch=on_watch)
        try:
            answer = asking.ask(wish, workers, until_done=wait, timeout_s=timeout_s)
        except NotARun:
            fail(CheckpointsCode.NOT_FOUND, f"{url} holds nothing of a run; is it the root of a run (run.url)?")
        except NoDriver as error:
            hint = f"; start the run with world.max_workers={workers} instead" if wish == "scale" else ""
            fail(CheckpointsCode.NO_DRIVER, f"no driver of {url} is alive ({error}): nobody is there to do it{hint}")
        except DriverGone as error:
            text = f"driver {error} of {url} has ended before it answered; whether it was done, its events say"
            fail(CheckpointsCode.NO_DRIVER, text)
    _finish(answer, url, wait=wait, timeout_s=timeout_s, is_json=is_json)


def _finish(answer: Answer, url: str, *, wait: bool, timeout_s: float, is_json: bool) -> None:
    reply = answer.reply
    code = _code_of(reply, wait=wait)
    if is_json:
        print_json(_facts(answer, url, code))
    if reply is not None and code is CheckpointsCode.OK:
        if not is_json:
            typer.echo(f"{reply.state}: {reply.reason}" + (f" (step {reply.step})" if reply.step is not None else ""))
        return
    if reply is not None and code is CheckpointsCode.REFUSED_BY_DRIVER:
        fail(code, f"the driver refused: {reply.reason}")
    if reply is None:
        fail(code, f"the driver of {url} did not take the request within {timeout_s:g} s; it is withdrawn")
    reason = f": {reply.reason}" if reply.reason else ""
    fail(code, f"not done within {timeout_s:g} s, and going on (--timeout): {reply.state}{reason}")


def _code_of(reply: Reply | None, *, wait: bool) -> CheckpointsCode:
    if reply is None:
        return CheckpointsCode.NO_ANSWER
    if reply.state == "refused":
        return CheckpointsCode.REFUSED_BY_DRIVER
    is_enough = reply.state == "done" or (reply.state == "accepted" and not wait)
    return CheckpointsCode.OK if is_enough else CheckpointsCode.NO_ANSWER


def _facts(answer: Answer, url: str, code: CheckpointsCode) -> dict[str, Any]:
    reply = answer.reply
    return {
        "run": url,
        "wish": answer.request.wish,
        "workers": answer.request.workers,
        "driver": answer.request.driver,
        "state": "withdrawn" if reply is None else reply.state,
        "reason": "" if reply is None else reply.reason,
        "step": None if reply is None else reply.step,
        "exit_code": int(code),
    }


def open_run(run: str) -> tuple[str, ObjectStore]:
    """The URL and the store of a Run that is named by its URL or by its YAML file."""
    import logging

    from orchestrator.errors import ConfigError
    from storage.open_store import open_store

    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(message)s")
    try:
        if run.endswith((".yaml", ".yml")) and "://" not in run:
            from orchestrator.load_config import load_config

            config = load_config(Path(run))
            return config.run.url, open_store(config.run.url, config.checkpoint.store)
        return run, open_store(run)
    except ConfigError as error:
        fail(CheckpointsCode.REFUSED, str(error))
    except (OSError, ValueError) as error:  # a URL that no store could be made from
        fail(CheckpointsCode.REFUSED, f"{run} cannot be read: {error}")
