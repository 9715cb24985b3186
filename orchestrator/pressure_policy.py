"""Memory that runs full: one save before the out-of-memory error comes. Pure.

When an episode begins and ends is told by training_signals.py; from which share on a rank is pressed is measured at
the ranks.
"""

from __future__ import annotations

from orchestrator.save_config import PressureConfig
from orchestrator.save_facts import Opinion, SaveFacts, TrainingFacts

__all__ = ["PressurePolicy"]


class PressurePolicy:
    """``PressurePolicy(config)``. Asks once in an episode, and again where it lasts ``repeat_s`` beyond the last save.

    It reads ``training.pressed_since_step``: a save of any policy after that step answers the episode, unless it came
    to nothing. The first word of an episode is pressing, since memory that is nearly full waits for no interval;
    episodes lie evaluations apart, so that this is no more than one save in several of them.
    """

    def __init__(self, config: PressureConfig) -> None:
        self._config = config

    @property
    def name(self) -> str:
        return "memory-pressure"

    def opinion(self, facts: SaveFacts) -> Opinion:
        training = facts.training
        if training is None or training.pressed_since_step is None:
            return Opinion(policy=self.name, due_at_s=None, why="no rank's memory is nearly full")
        why = _in_words(training, training.pressed_since_step)
        if not training.ranks_pressed:
            why = f"no rank's memory is nearly full now, but one was since step {training.pressed_since_step}"
            return Opinion(policy=self.name, due_at_s=None, why=why)
        if facts.last_save_step < training.pressed_since_step:
            return Opinion(policy=self.name, due_at_s=facts.now_s, why=why, is_pressing=True)
        if not facts.unsettled and facts.durable_step < training.pressed_since_step:
            why += f"; the save of step {facts.last_save_step} came to nothing"
            return Opinion(policy=self.name, due_at_s=facts.now_s, why=why)
        again_at_s = facts.last_save_at_s + self._config.repeat_s
        return Opinion(policy=self.name, due_at_s=again_at_s, why=f"{why}; saved at step {facts.last_save_step}")


def _in_words(training: TrainingFacts, since_step: int) -> str:
    ranks = "1 rank" if training.ranks_pressed == 1 else f"{training.ranks_pressed} ranks"
    share = "" if training.pressed_share is None else f", rank 0 uses {training.pressed_share:.1%}"
    return f"memory of {ranks} is nearly full{share}, since step {since_step}"
