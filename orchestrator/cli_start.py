"""What commands that start runs have in common: reading the configuration, and an exit code for every way out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from orchestrator.exit_codes import ExitCode

if TYPE_CHECKING:
    from orchestrator.config import RunConfig

__all__ = ["exit_code_of", "load"]


def load(path: Path, overrides: list[str], *, has_loop: bool = False) -> RunConfig:
    """The configuration of a run, and logging as it says. Raises ConfigError."""
    import logging

    from orchestrator.errors import ConfigError
    from orchestrator.load_config import load_config

    config = load_config(path, overrides)
    if not config.model.config and not has_loop:
        raise ConfigError(
            str(path), ("model.config is missing: only a training loop of your own (--loop) can do without",)
        )
    logging.basicConfig(level=config.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if config.log_level != "DEBUG":
        logging.getLogger("storage.retrying").setLevel(logging.ERROR)  # an outage is said once, as an event
    return config


def exit_code_of(drive: Callable[[], int]) -> int:
    """Run ``drive``; every way out has its exit code (orchestrator.exit_codes)."""
    from orchestrator.errors import ChaosSpecError, ConfigError, StartOutage
    from storage.errors import LeaseHeld, StoreRefused, StoreUnavailable

    try:
        return int(drive())
    except (StartOutage, StoreUnavailable) as error:  # the latter: it went away while a driver read its records
        typer.echo(f"error: {error}", err=True)
        return ExitCode.CONFIG_ERROR if isinstance(error, StoreRefused) else ExitCode.STORAGE_OUTAGE
    except (ConfigError, ChaosSpecError) as error:
        typer.echo(f"error: {error}", err=True)
        return ExitCode.CONFIG_ERROR
    except LeaseHeld as error:
        typer.echo(f"error: {error}", err=True)
        return ExitCode.REFUSED
    except (KeyboardInterrupt, SystemExit):  # Ray's handler turns a SIGTERM into the latter while it connects
        typer.echo("stopped", err=True)
        return ExitCode.STOPPED
    except Exception:  # noqa: BLE001 - the outermost edge: whatever it is, the code must say that it is our fault
        import traceback

        traceback.print_exc(file=sys.stderr)
        typer.echo("error: this is a fault of raysume; the lines above belong in a report", err=True)
        return ExitCode.INTERNAL_ERROR
