"""Heartbeats: who is silent or stuck. One outstanding call per member; the limit depends on the phase it reported last.

Only judges; killing is the controller's work, through the node agents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.config import FailureConfig
from workers.contract import Heartbeat, Phase

__all__ = ["Hang", "Pulse", "judge", "limit_of"]


# In a step, and on leaving, a member may stand still because another one is not as far yet.
_WAITING = frozenset({Phase.COMPILING, Phase.TRAINING, Phase.EVALUATING, Phase.LEAVING})
# While one member is at these, the others stand there for as long: its own limit is the one that counts.
_HOLDS_OTHERS_UP = frozenset({Phase.WAITING_FOR_DATA, Phase.CHECKPOINTING})


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
    and some stand still past their phase's limit, the one that has stood still longest is the culprit; nobody in a
    step is while a member waits for data, saves, or has moved lately, for which the others wait in turn."""
    silent = [
        Hang(worker_id=worker, detail=f"no answer for {pulse.silent_s:.1f} s (failure.silent_s {config.silent_s:g})")
        for worker, pulse in pulses.items()
        if pulse.silent_s > config.silent_s
    ]
    if silent:
        return tuple(silent)
    stuck: list[tuple[float, Hang]] = []
    beats = [pulse.beat for pulse in pulses.values() if pulse.beat is not None]
    for worker, pulse in pulses.items():
        if pulse.beat is None:
            continue
        limit = limit_of(pulse.beat.phase, config)
        if limit is not None and pulse.beat.age_s > limit:
            if pulse.beat.phase in _WAITING and any(_holds_up(beat, pulse.beat, limit, config) for beat in beats):
                continue
            reason = f"{pulse.beat.phase.value}_timeout"
            detail = f"{reason}: no progress for {pulse.beat.age_s:.1f} s at step {pulse.beat.step}, limit {limit:g} s"
            stuck.append((pulse.beat.age_s, Hang(worker_id=worker, detail=detail)))
    if not stuck:
        return ()
    return (max(stuck, key=lambda item: item[0])[1],)


def _holds_up(beat: Heartbeat, waiting: Heartbeat, limit_s: float, config: FailureConfig) -> bool:
    """Whether ``waiting``, past its limit of ``limit_s``, may only be waiting for the member of ``beat``: that is at
    something which takes longer than a step, or no longer at its own part than it may be, as just after such a thing,
    when the others' heartbeats are still old. All begin and end an evaluation, and leave, together: who has not come to
    that holds it up himself."""
    limit = limit_of(beat.phase, config)
    if beat.phase in _HOLDS_OTHERS_UP:
        return True
    if limit is None or beat.phase not in _WAITING or (beat.phase is Phase.LEAVING and waiting.phase is not beat.phase):
        return False
    return beat.age_s <= (min(limit, limit_s) if beat.phase is Phase.EVALUATING else limit)
