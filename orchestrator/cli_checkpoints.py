"""`raysume checkpoints`: what a run has committed, and what may be done with it. Needs neither Ray nor torch.

Which Checkpoints exist is asked of the commit log alone. Only commands that say so change anything.
"""

from __future__ import annotations

import typer

from orchestrator import cli_checkpoints_change, cli_checkpoints_copy, cli_checkpoints_diff, cli_checkpoints_read
from orchestrator.cli_checkpoints_place import CheckpointsCode

__all__ = ["CheckpointsCode", "checkpoints"]

checkpoints = typer.Typer(
    name="checkpoints",
    help="List, show, verify, compare, prune, quarantine and copy the checkpoints of a run.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    epilog="Something is wrong with a run?  raysume doctor URL",
)

for _name, _call, _epilog in (
    *cli_checkpoints_read.COMMANDS,
    *cli_checkpoints_diff.COMMANDS,
    *cli_checkpoints_change.COMMANDS,
    *cli_checkpoints_copy.COMMANDS,
):
    checkpoints.command(_name, epilog=_epilog)(_call)
