"""Tells why a worker did not start: its own code refused, which a new try would meet again, or it was lost on the way.

Facts only; whether the Run ends for it is the controller's question.
"""

from __future__ import annotations

from ray.exceptions import RayActorError, RayTaskError

from storage.errors import StoreUnavailable

__all__ = ["is_refusal", "reason_of"]

_PASSING = (StoreUnavailable, OSError, MemoryError, TimeoutError)  # another try, or another node, may go well
_MAX_REASON = 2_000


def is_refusal(error: BaseException) -> bool:
    """Whether the worker's constructor or `prepare` raised by itself, and not for want of a store, memory or disk."""
    if isinstance(error, RayTaskError):
        return not isinstance(error.cause, _PASSING)
    return isinstance(error, RayActorError) and error.actor_init_failed


def reason_of(error: BaseException) -> str:
    """One line of what was raised in the worker, without Ray's picture of the remote stack."""
    if isinstance(error, RayTaskError):
        return _shortened(f"{type(error.cause).__name__}: {error.cause}")
    if isinstance(error, RayActorError) and error.actor_init_failed:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return _shortened(lines[-1] if lines else type(error).__name__)
    return _shortened(f"{type(error).__name__}: {error}")


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_REASON else f"{line[:_MAX_REASON]} ..."
