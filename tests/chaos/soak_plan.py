"""The seeded schedule of a soak: which faults strike after which, and in the middle of what. Pure.

When a strike's turn has come, and on which node it falls, depends on the run; what it consists of does not.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.chaos import ChaosAction, ChaosPhase, ChaosVerb

__all__ = ["STEPS_PER_FAULT", "WEIGHTS", "Strike", "draw_strikes"]

STEPS_PER_FAULT = 16
WEIGHTS = {
    ChaosVerb.KILL_NODE: 5,
    ChaosVerb.KILL_WORKER: 5,
    ChaosVerb.KILL_KEEPER: 4,
    ChaosVerb.DRAIN_NODE: 3,
    ChaosVerb.RAISE_IN_WORKER: 3,
    ChaosVerb.STOP_WORKER: 2,
    ChaosVerb.OOM_WORKER: 2,
    ChaosVerb.SLOW_NODE: 2,
    ChaosVerb.KILL_DRIVER: 1,
    ChaosVerb.KILL_COORDINATOR: 1,
}
_OPENERS = (ChaosVerb.KILL_WORKER, ChaosVerb.KILL_NODE)
# What may fall into the middle of a recovery. An error of the training code, or hunger, needs code that trains.
_SECONDS = (ChaosVerb.KILL_WORKER, ChaosVerb.KILL_NODE, ChaosVerb.KILL_KEEPER, ChaosVerb.STOP_WORKER)
_SECOND_SHARE, _SAVE_SHARE = 0.3, 0.15
_MAX_GAP_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One or two faults, ``gap_steps`` after the run has got further than ever before.

    ``phase``: what the last of them waits for (None: it strikes at once). ``is_repaired_early``: nodes that were lost
    are replaced while the run still recovers, and not after.
    """

    number: int
    verbs: tuple[ChaosVerb, ...]
    phase: ChaosPhase | None
    gap_steps: int
    is_repaired_early: bool
    seconds: float

    def __str__(self) -> str:
        names = "+".join(self.verbs)
        return names if self.phase is None else f"{names}@{self.phase}"

    def action(self, index: int, step: int) -> ChaosAction:
        """What the schedule of a supervisor would call its fault ``index``, planned for ``step``."""
        verb = self.verbs[index]
        lasts = verb in (ChaosVerb.DRAIN_NODE, ChaosVerb.SLOW_NODE)
        return ChaosAction(verb=verb, step=step, notice_s=self.seconds if lasts else None)


def draw_strikes(seed: int, num_faults: int, verbs: Sequence[ChaosVerb] = tuple(WEIGHTS)) -> tuple[Strike, ...]:
    """Strikes of ``num_faults`` faults in all, out of ``verbs``: each of them comes once before any comes again."""
    draw = random.Random(seed)
    fresh = draw.sample(list(verbs), len(verbs))
    strikes: list[Strike] = []
    left = num_faults
    while left:
        first = fresh.pop() if fresh else draw.choices(verbs, [WEIGHTS[verb] for verb in verbs])[0]
        drawn, phase = _shape(draw, first, verbs, may_be_two=left > 1)
        fresh = [verb for verb in fresh if verb not in drawn]
        left -= len(drawn)
        strikes.append(
            Strike(
                number=len(strikes) + 1,
                verbs=drawn,
                phase=phase,
                gap_steps=draw.randint(1, _MAX_GAP_STEPS),
                is_repaired_early=draw.random() < 0.5,
                seconds=round(draw.uniform(1.0, 3.0), 1),
            )
        )
    return tuple(strikes)


def _shape(
    draw: random.Random, first: ChaosVerb, verbs: Sequence[ChaosVerb], *, may_be_two: bool
) -> tuple[tuple[ChaosVerb, ...], ChaosPhase | None]:
    """Alone, at a save, or with another fault: at once, or in the middle of the recovery from it."""
    luck = draw.random()
    if luck < _SAVE_SHARE:
        return (first,), ChaosPhase.SAVE
    seconds = [verb for verb in _SECONDS if verb in verbs]
    if not may_be_two or not seconds or luck > _SAVE_SHARE + _SECOND_SHARE:
        return (first,), None
    phase = draw.choice((None, ChaosPhase.LOAD, ChaosPhase.REGROUP))
    if phase is None:
        return (first, draw.choice(seconds)), None
    if first in seconds:
        return (draw.choice(_OPENERS), first), phase
    if first in (ChaosVerb.DRAIN_NODE, ChaosVerb.RAISE_IN_WORKER, ChaosVerb.KILL_DRIVER):
        # A leave, or a new driver, is no fault that an event would tell of.
        return (first, draw.choice(seconds)), ChaosPhase.LOAD
    return (first,), None
