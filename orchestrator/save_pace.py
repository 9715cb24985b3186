"""How long saves take, as the Run's own Signals tell: from the end of a step to its Commit; before there was one, how
large they are and how long replicas take. Measures only.

The times are the driver's own, so that no other machine's clock comes in; they include the moment it takes to hear.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from orchestrator.deadline_policy import FirstSave, SaveForecast, forecast_save
from orchestrator.save_config import DeadlineConfig
from orchestrator.save_facts import SaveTimes
from orchestrator.signals import (
    Committed,
    SaveBound,
    SaveDelayed,
    SaveFailed,
    SaveShare,
    SaveSkipped,
    Signal,
    StepFinished,
)
from workers.contract import OrderKind, StepReport

__all__ = ["SavePace"]

_SAVES = 5  # of the newest, whose median counts
_STEPS = 4096  # steps whose save may still be under way
_STEPS_TO_HEAR = 2  # at most, from the moment a replica is whole until the report that says so


class SavePace:
    """One per driver. A listener of the recorder. ``is_usually_bounded``: no cheaper form than the usual one exists."""

    def __init__(
        self,
        config: DeadlineConfig,
        *,
        is_usually_bounded: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config.model_copy(update={"cheaper_form": "none"}) if is_usually_bounded else config
        self._monotonic = monotonic
        self._world_size = 1
        self._state_bytes: float | None = None
        self._replicas: deque[tuple[int, float]] = deque(maxlen=_SAVES)  # with the size of the World
        self._safe_step = -1
        self._ended_at_s: dict[int, float] = {}
        self._delayed: set[int] = set()
        self._under_way: set[int] = set()
        self._saves: deque[tuple[int, SaveTimes]] = deque(maxlen=_SAVES)

    def begin(self, world_size: int, state_bytes: int | None = None) -> None:
        """A new World saves from here on. ``state_bytes``: of all ranks together, None: what was seen before holds."""
        self._world_size = world_size
        self._state_bytes = self._state_bytes if state_bytes is None else state_bytes
        self._safe_step = -1
        self._ended_at_s.clear()
        self._delayed.clear()
        self._under_way.clear()

    def on_signal(self, signal: Signal) -> None:
        match signal:
            case StepFinished(report=report):
                self._ended_at_s[report.step] = self._monotonic()
                self._take_replica(report)
                if len(self._ended_at_s) > _STEPS:
                    del self._ended_at_s[min(self._ended_at_s)]
            case SaveDelayed(step=step):
                # How long the store was away says nothing about the next save, and it held up all that are under way.
                self._delayed |= {step, *self._under_way}
            case SaveShare(report=share):
                self._state_bytes = float(share.snapshot_bytes * self._world_size)
            case SaveBound(bound=bound) if bound.kind is not OrderKind.PART:
                self._under_way.add(bound.step)
            case SaveFailed(step=step) | SaveSkipped(step=step):
                self._settle(step)
            case Committed(step=step):
                self._take(signal)
                self._settle(step)
            case _:
                pass

    def forecast(self) -> SaveForecast:
        """Of a save that the present World makes after those that are under way."""
        now = self._monotonic()
        forecast = forecast_save(tuple(self._saves), self._world_size, self._config, self._first())
        if not forecast.is_measured:
            return forecast  # a guess is counted once
        spent_s = (now - self._ended_at_s.get(step, now) for step in self._under_way)
        return replace(forecast, ahead_s=sum(max(0.0, forecast.full_s - one_s) for one_s in spent_s))

    def _settle(self, step: int) -> None:
        self._under_way.discard(step)
        self._delayed.discard(step)

    def _first(self) -> FirstSave:
        """What is known of this World's first save."""
        scaled = [seconds * max(1.0, size / self._world_size) for size, seconds in self._replicas]
        rank_bytes = None if self._state_bytes is None else self._state_bytes / self._world_size
        return FirstSave(rank_bytes=rank_bytes, replica_s=sorted(scaled)[len(scaled) // 2] if scaled else None)

    def _take_replica(self, report: StepReport) -> None:
        """From the end of a step until it was whole at its peers, less what it may take to hear of it."""
        began_s = self._ended_at_s.get(report.safe_step)
        if report.safe_step > self._safe_step and began_s is not None:
            took_s = self._monotonic() - began_s - _STEPS_TO_HEAR * report.step_s
            self._replicas.append((self._world_size, max(0.0, took_s)))
        self._safe_step = max(self._safe_step, report.safe_step)

    def _take(self, commit: Committed) -> None:
        began_s = self._ended_at_s.get(commit.step)
        if began_s is None or commit.step in self._delayed:
            return
        least_s = commit.stall_s + commit.upload_s  # both Signals may come in one look
        write_s = max(least_s, self._monotonic() - began_s)
        times = SaveTimes(
            step=commit.step,
            stall_s=commit.stall_s,
            encode_s=commit.encode_s,
            upload_s=commit.upload_s,
            commit_s=0.0,
            write_s=write_s,
            stored_bytes=commit.stored_bytes,
            raw_bytes=0,
        )
        self._saves.append((self._world_size, times))
