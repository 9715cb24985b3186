"""The save desk: gathers what the save policies are asked with, asks them, and keeps what outlives an Attempt.

A plain class of bounded size. Time is an argument and nothing is sent, so that a simulator runs it as the coordinator
does. It decides nothing itself: the policies have the opinions, `weighing` the rule.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.notice_policy import NoticePolicy
from orchestrator.save_backoff import SaveBackoff
from orchestrator.save_config import SavePolicyConfig
from orchestrator.save_facts import (
    ClusterFacts,
    SaveFacts,
    SavePolicy,
    SaveTimes,
    SaveWish,
    TrainingFacts,
    Weighed,
)
from orchestrator.save_policies import least_interval_s, policies_of
from orchestrator.save_times import FinishTimes, SaveCost, SaveUnderWay, StepPace
from orchestrator.threshold_feedback import ThresholdFeedback
from orchestrator.training_signals import TrainingSignals
from orchestrator.weighing import weigh
from storage.config import CheckpointConfig
from workers.contract import BoundOrder, EvalReport, StepReport

__all__ = ["SaveDesk", "ThresholdMove", "ThresholdSource"]

_INSTABILITY = "instability"
_CADENCE = 0  # the Order number of what rank 0 binds by itself
_KEPT_SAVES = 64
_KEPT_BESTS = 64
_KEPT_OVER = 64  # rank 0 has two unsettled saves at most: of older ones it says no word
_KEPT_NEWS = 64
_TOLD_MOVE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdMove:
    """Size and time of the saves so far have moved the instability threshold; ``old`` and ``new`` are its offsets."""

    step: int
    old: float
    new: float
    why: str


class ThresholdSource(Protocol):
    """How far the saves so far move the instability threshold."""

    def offset(self, saves: Sequence[SaveTimes]) -> float: ...

    def explain(self, saves: Sequence[SaveTimes]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    step: int
    at_s: float


class SaveDesk:
    """Owned and locked by the coordinator. ``policies`` and ``threshold`` None: those that the settings ask for."""

    def __init__(
        self,
        policy: SavePolicyConfig,
        checkpoint: CheckpointConfig,
        *,
        total_steps: int,
        policies: Sequence[SavePolicy] | None = None,
        threshold: ThresholdSource | None = None,
    ) -> None:
        self._policies = tuple(policies) if policies is not None else policies_of(policy, checkpoint)
        self._min_interval_s = least_interval_s(policy, checkpoint)
        self._backoff = SaveBackoff(self._min_interval_s)
        self._is_paced_by_rank_0 = checkpoint.every_steps is not None
        self._every_steps = policy.evaluate_every_steps
        self._total_steps = total_steps
        instability = policy.instability
        self._signals = TrainingSignals(
            policy.evaluate_every_steps, instability.quantile, window=instability.window, lag=instability.lag
        )
        self._feedback: ThresholdSource = threshold or ThresholdFeedback(policy.feedback)
        self._offset = self._told_offset = 0.0
        self._deadline, self._on_notice = policy.deadline, NoticePolicy(policy.deadline)
        self._noticed_at_s: float | None = None
        self._deadline_at_s: float | None = None
        self._cluster = ClusterFacts(num_nodes=1)
        self._saves: deque[SaveTimes] = deque(maxlen=_KEPT_SAVES)
        self._bests: deque[tuple[int, float]] = deque(maxlen=_KEPT_BESTS)
        self._pace = StepPace()
        self._finished = FinishTimes()
        self._under_way: dict[int, SaveUnderWay] = {}
        self._over: deque[int] = deque(maxlen=_KEPT_OVER)
        self._began = self._durable = self._nearest = self._last_save = _Mark(step=0, at_s=0.0)
        self._has_begun = False
        self._newest_step = 0
        self._training: TrainingFacts | None = None
        self._wish: SaveWish | None = None  # ordered, and not bound yet
        self._last_instability_step: int | None = None
        self._told_step = 0
        self._news: deque[Weighed | ThresholdMove] = deque(maxlen=_KEPT_NEWS)
        self.weighed: Weighed | None = None
        """The newest of all that was weighed."""

    def begin_attempt(self, base_step: int, now_s: float, durable_step: int | None = None) -> None:
        """Forget what lies beyond ``base_step``. An Attempt that goes on from memory keeps the Commit before it.

        ``durable_step``: of the newest Commit, where the Attempt goes on from memory and that is known. An older driver
        wrote it where this one has begun no Attempt yet: how long ago, nobody knows.
        """
        self._began = _Mark(step=base_step, at_s=now_s)
        if not self._has_begun and durable_step is not None and durable_step < base_step:
            self._durable = _Mark(step=durable_step, at_s=-math.inf)
        elif not self._has_begun or self._durable.step >= base_step:
            self._durable = self._began
        self._has_begun = True
        self._nearest = self._last_save = self._began
        self._newest_step = self._told_step = base_step
        self._pace.begin_world()
        self._finished.clear()
        self._under_way.clear()
        self._over.clear()
        self._backoff.reset()
        self._noticed_at_s = self._deadline_at_s = None
        self._training = self._wish = None
        while self._bests and self._bests[-1][0] > base_step:
            self._bests.pop()
        if self._last_instability_step is not None and self._last_instability_step > base_step:
            self._last_instability_step = None

    # -- what it is told --------------------------------------------------------------------------------------------

    def tell_cluster(self, facts: ClusterFacts, now_s: float) -> None:
        self._cluster = facts
        left_s = [notice.deadline_in_s for notice in facts.notices]
        known_s = [one_s for one_s in left_s if one_s is not None]
        if not left_s:
            self._noticed_at_s = None
        elif self._noticed_at_s is None:
            self._noticed_at_s = now_s
        self._deadline_at_s = now_s + min(known_s) if known_s and len(known_s) == len(left_s) else None

    def take_steps(self, reports: Sequence[StepReport], now_s: float) -> None:
        """Finished steps in order, the newest of them a moment ago. What was heard before is passed over."""
        for report in reports:
            if report.step > self._newest_step:
                self._take_step(report, self._finished.add(report, reports[-1], now_s))

    def _take_step(self, report: StepReport, at_s: float) -> None:
        if self._newest_step == self._began.step:
            self._begin_training(at_s - report.step_s)
        self._newest_step = report.step
        save = self._under_way.get(report.step)
        if save is not None:
            save.finished_at_s = at_s
        beside = [save for step, save in self._under_way.items() if step < report.step]
        if beside:  # saves are carried out one after another: the oldest is the one that is being written
            min(beside, key=lambda save: save.step).ran_beside(report.step_s)
        self._pace.add(report.step_s, is_quiet=not beside and save is None)
        if report.safe_step > self._nearest.step:
            safe_at_s = self._finished.of(report.safe_step)
            self._nearest = _Mark(step=report.safe_step, at_s=at_s if safe_at_s is None else safe_at_s)
        self._training = self._signals.add(report) or self._training

    def _begin_training(self, at_s: float) -> None:
        """The first step has begun: forming and loading were no work at risk."""
        before, self._began = self._began, _Mark(step=self._began.step, at_s=max(self._began.at_s, at_s))
        self._durable, self._nearest, self._last_save = (
            self._began if mark is before else mark for mark in (self._durable, self._nearest, self._last_save)
        )

    def take_evaluation(self, report: EvalReport) -> None:
        if not self._bests or self._bests[-1][0] < report.best_step:
            self._bests.append((report.best_step, report.best))

    def bound(self, bound: BoundOrder, now_s: float) -> None:
        """All ranks will save at ``bound.step``."""
        if bound.number != _CADENCE:
            if self._wish is not None and self._wish.policy == _INSTABILITY:
                self._last_instability_step = bound.step
            self._wish = None
        if bound.step > self._last_save.step:
            self._last_save = _Mark(step=bound.step, at_s=now_s)
        if bound.step not in self._over:
            self._under_way.setdefault(bound.step, SaveUnderWay(step=bound.step, bound_at_s=now_s))

    def delayed(self) -> None:
        """The store fails a save: how long it was away says nothing of the next save."""
        for save in self._under_way.values():
            save.is_delayed = True  # what holds up one holds up the others

    def gave_up(self, step: int, *, failed_at_s: float | None = None) -> float | None:
        """The save of ``step`` will never be a Checkpoint. ``failed_at_s`` None: a newer one is to take its place.

        Returns how long no other one is tried because saves failed; None: that is not this desk's to say.
        """
        self._under_way.pop(step, None)
        self._over.append(step)
        if failed_at_s is None:
            return None
        self._backoff.failed(self._last_save.at_s)
        return None if self._is_paced_by_rank_0 else max(0.0, self._backoff.next_try_at_s - failed_at_s)

    def committed(self, step: int, cost: SaveCost, now_s: float) -> SaveTimes:
        """The save of ``step`` is durable. Returns what it took, by now complete."""
        save = self._under_way.pop(step, None) or SaveUnderWay(step=step, bound_at_s=now_s)
        self._over.append(step)
        self._backoff.reset()
        finished_at_s = save.finished_at_s if save.finished_at_s is not None else self._finished.of(step)
        at_s = save.bound_at_s if finished_at_s is None else finished_at_s
        times = SaveTimes(
            step=step,
            stall_s=cost.stall_s,
            encode_s=cost.encode_s,
            upload_s=cost.upload_s,
            commit_s=cost.commit_s,
            write_s=max(0.0, now_s - at_s),
            stored_bytes=cost.stored_bytes,
            raw_bytes=cost.raw_bytes,
            slowdown_s=self._pace.slowdown_s(save),
        )
        if not save.is_delayed:
            self._saves.append(times)
            self._move_threshold(times)
        if step > self._durable.step:
            self._durable = _Mark(step=step, at_s=at_s)
        if step > self._nearest.step:
            self._nearest = self._durable
        return times

    def _move_threshold(self, times: SaveTimes) -> None:
        saves = tuple(self._saves)
        self._offset = self._feedback.offset(saves)
        is_heard = any(policy.name == _INSTABILITY for policy in self._policies)
        if is_heard and abs(self._offset - self._told_offset) >= _TOLD_MOVE:
            why = self._feedback.explain(saves)
            self._news.append(ThresholdMove(step=times.step, old=self._told_offset, new=self._offset, why=why))
            self._told_offset = self._offset

    # -- what it is asked -------------------------------------------------------------------------------------------

    def consult(self, now_s: float) -> SaveWish | None:
        """A save to order now. None while one that was wished is not bound, and before an Attempt's first step."""
        if self._wish is not None or self._newest_step == self._began.step:
            return None
        facts = self.facts(now_s)
        asked = self._policies if facts.noticed_at_s is None else (*self._policies, self._on_notice)
        weighed = weigh(facts, asked, min_interval_s=self._min_interval_s, deadline=self._deadline)
        self.weighed, self._wish = weighed, weighed.wish
        if weighed.wish is not None or weighed.step - self._told_step >= self._every_steps:
            self._told_step = weighed.step
            self._news.append(weighed)
        return weighed.wish

    def take_news(self) -> tuple[Weighed | ThresholdMove, ...]:
        """What is worth an event since the last call: every wish, else one word in ``evaluate_every_steps`` steps."""
        news = tuple(self._news)
        self._news.clear()
        return news

    def facts(self, now_s: float) -> SaveFacts:
        return SaveFacts(
            now_s=now_s,
            newest_step=self._newest_step,
            total_steps=self._total_steps,
            unsettled=len(self._under_way),
            last_save_step=self._last_save.step,
            last_save_at_s=self._last_save.at_s,
            durable_step=self._durable.step,
            durable_at_s=self._durable.at_s,
            nearest_step=self._nearest.step,
            nearest_at_s=self._nearest.at_s,
            step_s=self._pace.step_s,
            saves=tuple(self._saves),
            cluster=self._cluster,
            training=self._training,
            threshold_offset=self._offset,
            last_instability_step=self._last_instability_step,
            best_step=self._bests[-1][0] if self._bests else None,
            saved_best_step=self._saved_best_step(),
            failed_in_row=self._backoff.in_row,
            next_try_at_s=self._backoff.next_try_at_s,
            noticed_at_s=self._noticed_at_s,
            deadline_at_s=self._deadline_at_s,
        )

    def _saved_best_step(self) -> int | None:
        """The newest best step that is durable, or will be by a save under way."""
        covered = max((self._durable.step, *self._under_way))
        return next((step for step, _ in reversed(self._bests) if step <= covered), None)
