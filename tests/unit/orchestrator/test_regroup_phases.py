"""Where the time up to the first step went: pure folding of heartbeats."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.regroup_phases import phase_fields
from storage.keys import Attempt
from workers.contract import Heartbeat, Phase, Restored

ATTEMPT = Attempt(number=2, nonce="abcd1234")
SPENT = {Phase.FORMING: 0.1, Phase.LOADING: 0.5, Phase.COMPILING: 0.7}
RESTORED = Restored(attempt=ATTEMPT, step=3, bytes_by_tier={}, bound=None, reseeded=False, load_s=0.4)
BEAT = Heartbeat(
    worker_id="w", attempt=ATTEMPT, phase=Phase.TRAINING, step=4, age_s=0.0, restored=RESTORED, spent_s=SPENT
)


def test_the_slowest_rank_counts_in_each_phase() -> None:
    other = replace(BEAT, spent_s=SPENT | {Phase.FORMING: 0.3, Phase.COMPILING: 0.6})
    told = phase_fields([BEAT, other], ATTEMPT)
    assert told == {"form_s": 0.3, "build_s": 0.1, "load_s": 0.4, "first_step_s": 0.7}


def test_nothing_is_told_before_every_rank_has_made_a_step_in_this_attempt() -> None:
    early = replace(BEAT, spent_s={Phase.FORMING: 0.1}, restored=None)
    stale = replace(BEAT, attempt=Attempt(number=1, nonce="abcd1234"))
    assert phase_fields([BEAT, early], ATTEMPT) is None
    assert phase_fields([BEAT, None], ATTEMPT) is None
    assert phase_fields([BEAT, stale], ATTEMPT) is None
    assert phase_fields([], ATTEMPT) is None


def test_without_a_restore_all_of_loading_is_building() -> None:
    told = phase_fields([replace(BEAT, restored=None)], ATTEMPT)
    assert told is not None
    assert (told["build_s"], told["load_s"]) == (0.5, 0.0)
