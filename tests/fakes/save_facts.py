"""Facts for save policies on a fake clock: one of each, with what a test does not care about filled in."""

from __future__ import annotations

from typing import Any

from orchestrator.save_facts import ClusterFacts, SaveFacts, SaveTimes

__all__ = ["cluster", "save_facts", "save_times"]


def save_times(
    *, stall_s: float = 0.0, slowdown_s: float | None = None, write_s: float = 0.0, step: int = 1, raw_bytes: int = 1
) -> SaveTimes:
    return SaveTimes(
        step=step,
        stall_s=stall_s,
        encode_s=0.0,
        upload_s=write_s,
        commit_s=0.0,
        write_s=write_s,
        stored_bytes=1,
        raw_bytes=raw_bytes,
        slowdown_s=slowdown_s,
    )


def cluster(**fields: Any) -> ClusterFacts:
    return ClusterFacts(**({"num_nodes": 1} | fields))


def save_facts(now_s: float = 0.0, **fields: Any) -> SaveFacts:
    """An Attempt that began at 0 with step 0, and has come to step 10 of a million by ``now_s``."""
    defaults: dict[str, Any] = {
        "newest_step": 10,
        "total_steps": 1_000_000,
        "unsettled": 0,
        "last_save_step": 0,
        "last_save_at_s": 0.0,
        "durable_step": 0,
        "durable_at_s": 0.0,
        "nearest_step": 0,
        "nearest_at_s": 0.0,
    }
    return SaveFacts(now_s=now_s, **(defaults | fields))
