"""`--loop MODULE:FUNCTION` and `--loop-config JSON`: a user's own training loop, named on the command line.

Whether the loop can be imported is asked of a process of its own: a driver loads neither torch nor what users import.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.own_python import child_environment, child_python
from workers.loop_reference import LoopNotFound, LoopReference

__all__ = ["UserLoop", "read_loop"]

_LIMIT_S = 300.0
_KEPT_LINES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class UserLoop:
    """``reference`` None: the built-in recipe."""

    reference: LoopReference | None
    config: dict[str, Any]

    def options(self) -> tuple[str, ...]:
        """The command line options that say the same again."""
        loop = () if self.reference is None else ("--loop", str(self.reference))
        return (*loop, "--loop-config", json.dumps(self.config)) if self.config else loop

    def require(self) -> None:
        """Raise ConfigError where no function can be imported by that name."""
        if self.reference is None:
            return
        command = child_python("workers.loop_reference", str(self.reference))
        try:
            done = subprocess.run(
                command,
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError("--loop", (f"importing {self.reference} took more than {_LIMIT_S:g} s",)) from None
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"importing it ended with exit code {done.returncode}"]
            raise ConfigError("--loop", ("\n".join(said[-_KEPT_LINES:]),))


def read_loop(name: str | None, config: str | None) -> UserLoop:
    """Raises ConfigError for what cannot be read."""
    values = {} if config is None else _read_config(config)
    if name is None:
        if config is not None:
            raise ConfigError("--loop-config", ("it is handed to a loop of your own: name one with --loop",))
        return UserLoop(reference=None, config={})
    try:
        return UserLoop(reference=LoopReference.parse(name, os.getcwd()), config=values)
    except LoopNotFound as error:
        raise ConfigError("--loop", (str(error),)) from None


def _read_config(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError("--loop-config", (f"not JSON: {error}; {text!r}",)) from None
    if not isinstance(values, dict):
        raise ConfigError("--loop-config", (f"expected a JSON object, e.g. '{{\"width\": 64}}', found {text!r}",))
    return values
