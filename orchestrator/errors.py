"""Errors of the driver side: one root, each says what failed, what was expected and what to do.

They survive pickling: every field is a constructor argument kept in ``args``.
"""

from __future__ import annotations

from storage.errors import StorageError, StoreRefused, StoreUnavailable

__all__ = ["ChaosSpecError", "ConfigError", "OrchestratorError", "StartOutage", "SupervisorError", "cannot_start"]


class OrchestratorError(Exception):
    """Root of every error this package raises on purpose."""


class ConfigError(OrchestratorError):
    """The configuration cannot be used; nothing was started. ``problems`` holds one line for each thing wrong."""

    def __init__(self, where: str, problems: tuple[str, ...]) -> None:
        super().__init__(where, problems)
        self.where, self.problems = where, problems

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"{self.where}: {self.problems[0]}"
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        return f"{self.where}: {len(self.problems)} problems\n{lines}"


class StartOutage(ConfigError):
    """Nothing was started because the store does not answer: the configuration may be good, so try again later."""


def cannot_start(url: str, text: str, error: StorageError) -> ConfigError:
    """What to raise where ``error`` of the store at ``url`` keeps a Run from beginning; ``text`` is its line."""
    is_outage = isinstance(error, StoreUnavailable) and not isinstance(error, StoreRefused)
    return StartOutage(url, (f"{text}; try again when it is back",)) if is_outage else ConfigError(url, (text,))


class ChaosSpecError(OrchestratorError):
    """A part of ``--chaos`` cannot be read. ``part`` is that part as it was written."""

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(part, reason)
        self.part, self.reason = part, reason

    def __str__(self) -> str:
        return f"--chaos: {self.part!r}: {self.reason}"


class SupervisorError(OrchestratorError):
    """The local cluster, or an action of the chaos schedule on it, did not do what was asked."""
