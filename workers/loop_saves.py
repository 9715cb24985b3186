"""Saves of a loop without a coordinator: at each step boundary the ranks agree on what rank 0's trigger asks for.

At most one save is under way, and training waits for none but the last. How a Checkpoint is stored is
`workers.loop_checkpoints`'s matter, what is in it the caller's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from storage.config import CheckpointConfig
from storage.errors import StorageError
from workers.loop_checkpoints import LoopCheckpoints
from workers.save_trigger import SaveOver, SaveTrigger, StepFacts
from workers.state import TrainingState
from workers.unison import Ranks, Word

__all__ = ["LoopSaves", "Taking"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taking:
    """Why a Checkpoint is taken now. ``is_last``: nothing is trained in this process after it."""

    step: int
    is_last: bool


class LoopSaves:
    """Made on every rank for one stretch of training. ``take`` names the state to save, with its Progress set."""

    def __init__(
        self,
        checkpoints: LoopCheckpoints,
        ranks: Ranks,
        trigger: SaveTrigger,
        take: Callable[[Taking], TrainingState],
        *,
        config: CheckpointConfig,
    ) -> None:
        self._checkpoints, self._ranks, self._trigger, self._take = checkpoints, ranks, trigger, take
        self._max_failed, self._timeout_s = config.max_failed_saves, config.final_timeout_s
        self._saved_step = 0
        self._num_failed = 0
        self._failure: str | None = None
        self._reason = ""
        self._facts: StepFacts | None = None

    @property
    def saved_step(self) -> int:
        """The newest committed step of this process, or the one it began with."""
        return self._saved_step

    def begin(self, base_step: int, total_steps: int) -> None:
        self._saved_step = base_step
        if self._ranks.rank == 0:
            self._trigger.begin(base_step, total_steps, self._ranks.size)

    def boundary(self, step: int, facts: StepFacts | None, *, told_to_stop: bool) -> bool:
        """Every rank, once between two steps; ``facts`` of the step that ended, None where none did. True: all ranks
        stop here, and ``step`` is committed."""
        if facts is not None:
            self._learn(facts)
        stops: list[bool] = []
        self._ranks.exchange(partial(self._say, step, told_to_stop), lambda word: stops.append(self._act(step, word)))
        return stops[0]

    def finish(self, step: int, facts: StepFacts | None, *, told_to_stop: Callable[[], bool]) -> bool:
        """Every rank, after the last step: it is committed when this returns. Raises StorageError where it is not.

        True: some rank was told to stop, in the last step too or while it was saved; the same on each.
        """
        if facts is not None:
            self._learn(facts)
        self._ranks.heard()  # what was said of going on; who was told to stop says so again below
        self._save_last(step, "last step")
        return any(self._ranks.gathered(told_to_stop()))

    def _learn(self, facts: StepFacts) -> None:
        self._facts = facts
        if self._ranks.rank == 0:
            self._trigger.take_step(facts)

    def _say(self, step: int, told_to_stop: bool) -> Word:
        if self._checkpoints.is_over:
            self._settle()
        due_at, reason = step + self._ranks.lag, None
        if self._ranks.rank == 0 and self._checkpoints.step_under_way is None:
            reason = self._trigger.due(due_at)
        if reason is not None:
            self._reason = reason
        return Word(save_at=0 if reason is None else due_at, stop=told_to_stop, give_up=self._is_hopeless)

    @property
    def _is_hopeless(self) -> bool:
        """Ranks see a save end at different steps: which of them is the last one, they have to agree on."""
        return self._max_failed is not None and self._num_failed >= self._max_failed

    def _act(self, step: int, word: Word) -> bool:
        if word.stop:
            self._save_last(step, "told to stop")
            return True
        if word.give_up:
            self._settle()
            raise StorageError(
                f"rank {self._ranks.rank}: {self._max_failed} saves in a row failed, as many as "
                f"checkpoint.max_failed_saves allows; the newest checkpoint is step {self._saved_step}: "
                f"{self._failure or 'it was another rank that saw them fail'}"
            )
        if word.save_at == step and step > self._saved_step:
            self._settle()
            self._save(Taking(step=step, is_last=False), self._reason)
        return False

    def _save_last(self, step: int, reason: str) -> None:
        self._settle_alike()
        if step > self._saved_step:
            self._save(Taking(step=step, is_last=True), reason)
            self._settle_alike()
        if step > self._saved_step:
            raise StorageError(
                f"rank {self._ranks.rank}: step {step}, the last of this process, could not be saved, {self._failure}; "
                f"run again: it goes on from step {self._saved_step}"
            )

    def _save(self, taking: Taking, reason: str) -> None:
        facts = self._facts if self._facts is not None and self._facts.step == taking.step else None
        if self._ranks.rank == 0:
            self._trigger.began(taking.step)
        self._checkpoints.save(
            self._take(taking),
            loss=None if facts is None else facts.loss,
            metric=None if facts is None else facts.metric,
            metadata={"reason": reason},
        )

    def _settle(self) -> None:
        """Take in how the save under way ended; waits for it, as every rank does at the same step."""
        over = self._checkpoints.settle(self._timeout_s)
        if over is None:
            return
        if self._ranks.rank == 0:
            self._trigger.over(over)
        if over.failure is None:
            self._saved_step, self._num_failed = over.step, 0
            if self._ranks.rank == 0:
                logger.info(
                    "step %d is committed (%s): training stood for %.3f s, %.2f s until then",
                    over.step,
                    self._reason,
                    over.stall_s,
                    over.write_s,
                )
            return
        self._take_failure(over)

    def _settle_alike(self) -> None:
        """Rank 0 commits, so its word counts: a rank that lost touch at the end of a save must not save alone."""
        self._settle()
        self._saved_step = self._ranks.from_first(lambda: self._saved_step)

    def _take_failure(self, over: SaveOver) -> None:
        self._num_failed += 1
        self._failure = over.failure
        logger.warning("rank %d: step %d was not saved: %s", self._ranks.rank, over.step, over.failure)
