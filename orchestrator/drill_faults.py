"""Draws the faults of a drill from a seed: which, when, in which order. Pure: the same numbers, the same schedule."""

from __future__ import annotations

import random
from collections.abc import Sequence

from orchestrator.chaos import ChaosAction, ChaosVerb
from orchestrator.errors import ConfigError

__all__ = ["NUM_FAULTS", "draw_faults"]

NUM_FAULTS = 6
_MIN_GAP = 4  # steps from one fault to the next: a save and a recovery take that many
_LAST_SHARE = 0.85  # of all steps: what comes later leaves no step to compare
_NOTICE_S = 8.0

RESIZE = "resize"  # a shrink that is asked for, and the growth back
_ORDER = (
    ChaosVerb.KILL_WORKER,
    ChaosVerb.KILL_NODE,
    ChaosVerb.DRAIN_NODE,
    RESIZE,
    ChaosVerb.STOP_WORKER,
)
"""What comes first where few are drawn; two kinds of kill, a hang, a drain, and a change of size each way."""

LAST = ChaosVerb.KILL_DRIVER
"""Its workers end with a driver: from here on every process is new, whatever struck before, and keeps nothing that the
state does not hold."""


def draw_faults(*, num_steps: int, num_workers: int, num_faults: int, seed: int) -> tuple[ChaosAction, ...]:
    """``num_faults`` of them, spread over the steps, `LAST` at the end; a node that goes away is replaced at once.

    ``num_workers``: of a full World. Raises ConfigError where the steps are too few.
    """
    last = int(num_steps * _LAST_SHARE)
    if num_faults < 1 or last < _MIN_GAP * num_faults:
        least = -(-_MIN_GAP * max(1, num_faults) * 100 // int(_LAST_SHARE * 100))
        raise ConfigError("drill", (f"{num_faults} faults need {least} steps at least, there are {num_steps}",))
    draw = random.Random(seed)
    kinds = _kinds(draw, num_faults, may_resize=num_workers > 1)
    gap = last / num_faults
    actions: list[ChaosAction] = []
    for index, kind in enumerate(kinds):
        begin = int(index * gap) + 1 + draw.randrange(max(1, int(gap / 4)))
        if kind == LAST:
            begin = int((index + 0.5) * gap) + 1  # something is to be restored by then, even where it comes alone
        actions += _actions(kind, max(2, begin), int((index + 0.6) * gap) + 1, num_workers)
    return tuple(sorted(actions, key=lambda action: action.step))


def _kinds(draw: random.Random, num_faults: int, *, may_resize: bool) -> list[str]:
    pool = [kind for kind in _ORDER if may_resize or kind != RESIZE]
    kinds: list[str] = [*pool[: num_faults - 1]]
    kinds += draw.choices(pool, k=num_faults - 1 - len(kinds))
    draw.shuffle(kinds)
    return [*kinds, LAST]


def _actions(kind: str, step: int, back_step: int, num_workers: int) -> Sequence[ChaosAction]:
    if kind == RESIZE:
        return (
            ChaosAction(verb=ChaosVerb.SCALE, step=step, workers=max(1, num_workers // 2)),
            ChaosAction(verb=ChaosVerb.SCALE, step=max(step + 2, back_step), workers=num_workers),
        )
    verb = ChaosVerb(kind)
    if verb is ChaosVerb.KILL_NODE:
        # The new one first: there is always a node, even where there was but one.
        return ChaosAction(verb=ChaosVerb.ADD_NODE, step=step), ChaosAction(verb=verb, step=step)
    if verb is ChaosVerb.DRAIN_NODE:
        return (
            ChaosAction(verb=ChaosVerb.ADD_NODE, step=step),
            ChaosAction(verb=verb, step=step, notice_s=_NOTICE_S),
        )
    return (ChaosAction(verb=verb, step=step),)
