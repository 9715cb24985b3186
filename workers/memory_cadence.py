"""When all ranks keep a Snapshot in memory, and which of these steps is known to be whole everywhere.

Pure, and equal on all ranks but for `bind`, which is rank 0's: like an Order, the next such step is bound two steps
ahead and learned from the step vector. It takes no Snapshot and asks no Keeper.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from storage.config import MemoryConfig
from workers.order_plan import BIND_AHEAD
from workers.step_vector import NUM_REPLICAS_TOLD

__all__ = ["MemoryCadence"]

_MAX_UNPROVEN = 16
_MAX_SPACING = 1000
_UNMEASURED = 8  # from one to the next while none was measured: rank 0 may have found no buffer in time
_MAX_LAG = 64  # of a peer that is away
_MAX_PROVEN_LAG = 8


class MemoryCadence:
    """One Attempt's. Call order at the end of a step: `told` and `bind`, `learn` (older vectors), `reach`."""

    def __init__(self, config: MemoryConfig, *, base_step: int, total_steps: int, world_size: int) -> None:
        self._config, self._total_steps, self._world_size = config, total_steps, world_size
        # The vector of the first step is read too late to speak of the two that follow the base.
        standing = range(base_step + 1, base_step + 1 + (BIND_AHEAD if config.every_steps == 1 else 1))
        self._planned = {step for step in standing if step <= total_steps}
        self._first = self._last_bound = max(self._planned, default=base_step)
        self._newest_step = self._safe_step = -1
        self._unproven: list[int] = []  # due, newer than the safe step, left out by no rank as far as is known
        self._told: dict[int, tuple[int, ...]] = {}  # by step whose vector was filled and is not learned yet
        self._given_up: deque[int] = deque(maxlen=_MAX_UNPROVEN)
        self._lag = 1
        self._stalls: deque[float] = deque(maxlen=3)
        self._steps_s: deque[float] = deque(maxlen=5)

    @property
    def safe_step(self) -> int:
        """The newest step of which every rank has a Snapshot in memory and a replica of it; -1: none."""
        return self._safe_step

    @property
    def newest_step(self) -> int:
        """The newest step that all ranks were to keep in memory; -1: none."""
        return self._newest_step

    @property
    def given_up(self) -> tuple[int, ...]:
        """Steps newer than the safe one that some rank left out: they will never be whole and only take room."""
        return tuple(step for step in self._given_up if step > self._safe_step)

    def reach(self, step: int, *, is_ordered: bool = False) -> bool:
        """Whether a Snapshot of ``step`` belongs into memory: it is due, or one is taken for an Order anyway."""
        is_due = step in self._planned or is_ordered
        self._planned.discard(step)
        if is_due:
            self._newest_step = step
            self._unproven.append(step)
            if len(self._unproven) > _MAX_UNPROVEN:
                del self._unproven[NUM_REPLICAS_TOLD]  # no rank has room for more than the oldest
        return is_due

    def told(self, step: int) -> tuple[int, ...]:
        """The steps that the vector of ``step`` speaks of: the oldest ones, which are what buffers are full of when
        replicas are late, and the newest. Settled when it is filled: what older vectors say comes in between."""
        if step not in self._told:
            before = [due for due in self._unproven if due < step]
            self._told[step] = (*before[: NUM_REPLICAS_TOLD - 1], *before[NUM_REPLICAS_TOLD - 1 :][-1:])
        return self._told[step]

    def learn(self, step: int, memory_step: int, num_replicated: Sequence[int], num_left_out: Sequence[int]) -> None:
        """Take in what the vector of ``step`` said."""
        if memory_step > step:
            self._planned.add(memory_step)
        told = self._told.pop(step, ())
        for due, num_whole, num_without in zip(told, num_replicated, num_left_out, strict=False):
            if due not in self._unproven:
                continue  # an older vector has settled it
            if num_whole == self._world_size:
                self._safe_step, self._lag = due, min(_MAX_PROVEN_LAG, step - due)
            elif num_without:
                self._unproven.remove(due)
                self._given_up.append(due)
        self._unproven = [due for due in self._unproven if due > self._safe_step]
        if told and told[0] in self._unproven:
            self._lag = min(_MAX_LAG, max(self._lag, step - told[0] + 1))

    def note_stall(self, stall_s: float) -> None:
        """How long rank 0 stood still for its newest Snapshot in memory."""
        self._stalls.append(stall_s)

    def bind(self, step: int, step_s: float) -> int:
        """Rank 0, at the end of ``step``: the step after next if a Snapshot of it is to be kept in memory, else 0."""
        self._steps_s.append(step_s)
        target, spacing = step + BIND_AHEAD, self._spacing()
        if target > self._total_steps or target - self._last_bound < spacing:
            return 0
        self._last_bound = target
        return target

    def _spacing(self) -> int:
        """Steps from one to the next: as few as the settings allow, and enough for replicas to be made meanwhile."""
        if self._config.every_steps is not None:
            return max(self._config.every_steps, self._lag)
        if not self._stalls:  # the first one met cold memory and says nothing: one more to measure, then wait for it
            return BIND_AHEAD if self._last_bound == self._first else max(_UNMEASURED, self._lag)
        allowed_s = self._config.max_slowdown * statistics.median(self._steps_s)
        wanted = math.ceil(min(self._stalls) / allowed_s) if allowed_s > 0 else _MAX_SPACING
        return max(1, self._lag, min(wanted, _MAX_SPACING))
