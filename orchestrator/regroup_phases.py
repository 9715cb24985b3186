"""How long the ranks of an Attempt took from its start to the end of its first step, by phase. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from storage.keys import Attempt
from workers.contract import Heartbeat, Phase

__all__ = ["phase_fields"]


def phase_fields(beats: Iterable[Heartbeat | None], attempt: Attempt) -> dict[str, Any] | None:
    """The slowest rank's time in each phase: ``form_s`` to find each other, ``build_s`` for model and optimizer,
    ``load_s`` for the restore, ``first_step_s``. None while a rank has not told of all."""
    told = [beat if beat is not None and beat.attempt == attempt else None for beat in beats]
    spent = [beat.spent_s if beat is not None else {} for beat in told]
    if not spent or not all(Phase.COMPILING in one for one in spent):
        return None
    restores = [beat.restored for beat in told if beat is not None]
    loads = [restored.load_s for restored in restores if restored is not None and restored.attempt == attempt]
    load_s = max(loads, default=0.0)
    slowest = {phase: max(one.get(phase, 0.0) for one in spent) for phase in Phase}
    return {
        "form_s": round(slowest[Phase.FORMING], 4),
        "build_s": round(max(0.0, slowest[Phase.LOADING] - load_s), 4),
        "load_s": round(load_s, 4),
        "first_step_s": round(slowest[Phase.COMPILING], 4),
    }
