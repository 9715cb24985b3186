"""Heartbeats: who is silent or stuck. One outstanding call per member; the limit depends on the phase it reported last.

Only judges; killing is the controller's work, through the node agents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.config import FailureConfig
from workers.contract import Heartbeat, Phase

__all__ = ["Hang", "Pulse", "judge", "limit_of"]


_IN_A_STEP = frozenset({Phase.COMPILING, Phase.TRAINING, Phase.EVALUATING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """The newest heartbeat of a member and how long ago the last answer came (``silent_s``)."""

    beat: Heartbeat | None
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    worker_id: str
    detail: str


def limit_of(phase: Phase, config: FailureConfig) -> float | None:
    """Longest time without progress in this phase, in seconds; None: no limit."""
    match phase:
        case Phase.STARTING:
            return config.starting_s
        case Phase.FORMING:
            return config.forming_s
        case Phase.LOADING | Phase.WAITING_FOR_DATA:
            return config.loading_s
        case Phase.COMPILING:
            return config.compiling_s
        case Phase.TRAINING:
            return config.training_s
        case Phase.EVALUATING:
            return config.evaluating_s
        case Phase.CHECKPOINTING:
            return config.checkpointing_s
        case Phase.LEAVING:
            return config.leaving_s
        case Phase.IDLE:
            return None


def judge(pulses: Mapping[str, Pulse], config: FailureConfig) -> tuple[Hang, ...]:
    """The members to be killed. Silent processes first: when one is stopped, the others only wait for it. If all answer
    and some stand still past their phase's limit, the one that has stood still longest is the culprit; none is while a
    member waits for data, for which the others wait in turn."""
    silent = [
        Hang(worker_id=worker, detail=f"no answer for {pulse.silent_s:.1f} s (failure.silent_s {config.silent_s:g})")
        for worker, pulse in pulses.items()
        if pulse.silent_s > config.silent_s
    ]
    if silent:
        return tuple(silent)
    stuck: list[tuple[float, Hang]] = []
    is_data_awaited = any(p.beat is not None and p.beat.phase is Phase.WAITING_FOR_DATA for p in pulses.values())
    for worker, pulse in pulses.items():
        if pulse.beat is None or (is_data_awaited and pulse.beat.phase in _IN_A_STEP):
            continue
        limit = limit_of(pulse.beat.phase, config)
        if limit is not None and pulse.beat.age_s > limit:
            reason = f"{pulse.beat.phase.value}_timeout"
            detail = f"{reason}: no progress for {pulse.beat.age_s:.1f} s at step {pulse.beat.step}, limit {limit:g} s"
            stuck.append((pulse.beat.age_s, Hang(worker_id=worker, detail=detail)))
    if not stuck:
        return ()
    return (max(stuck, key=lambda item: item[0])[1],)
