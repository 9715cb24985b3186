"""Decisions: what a policy chose about the World. Values only; carrying them out is the controller's work."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.exit_codes import ExitCode

__all__ = ["Decision", "Keep", "Leave", "Regroup", "Stop", "Wait"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Leave the World as it is. ``reason``: why it does not grow although it could; empty where there is none."""

    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Order all ranks to snapshot and leave at a coming step, then regroup. ``cause``: the next Attempt's."""

    cause: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Regroup:
    """Form a new World under the next Attempt."""

    cause: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Too few workers: wait for capacity. ``missing`` says for what, in words."""

    have: int
    need: int
    missing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the Run's driver with this exit code."""

    exit_code: ExitCode
    reason: str


Decision = Keep | Leave | Regroup | Wait | Stop
