"""When the next Checkpoint is verified, and how much of it is read at once. Pure: load and ages are arguments."""

from __future__ import annotations

from collections.abc import Sequence

from storage.config import CheckpointConfig
from storage.verify import SHARDS_AT_ONCE

__all__ = ["MAX_FAILURES", "may_begin", "shards_at_once", "verify_limit_s"]

MAX_FAILURES = 3
"""Verifier processes in a row that may be lost or hang before it is left at that."""
_LEAST_S = 300.0
_LEAST_BYTES_PER_S = 2e6


def may_begin(config: CheckpointConfig, *, load_per_core: float, ages_s: Sequence[float]) -> bool:
    """``ages_s``: of the Checkpoints that are not verified yet. On a busy machine the oldest one must be of age."""
    if not ages_s:
        return False
    return load_per_core < config.verify_load_per_core or max(ages_s) >= config.verify_after_s


def shards_at_once(config: CheckpointConfig, *, load_per_core: float) -> int:
    """A busy machine has one Shard read after another, by one thread; its own reading makes it busy too."""
    return SHARDS_AT_ONCE if load_per_core < config.verify_load_per_core else 1


def verify_limit_s(stored_bytes: int) -> float:
    """The longest that verifying one Checkpoint may take before its process is taken for hung. It is read twice."""
    return _LEAST_S + 2 * stored_bytes / _LEAST_BYTES_PER_S
