"""How long saves take, as the Run's own Signals tell: from the end of a step to its Commit. Measures only.

The times are the driver's own, so that no other machine's clock comes in; they include the moment it takes to hear.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from orchestrator.deadline_policy import SaveForecast, forecast_save
from orchestrator.save_config import DeadlineConfig
from orchestrator.save_facts import SaveTimes
from orchestrator.signals import Committed, SaveBound, SaveDelayed, SaveFailed, SaveSkipped, Signal, StepFinished
from workers.contract import OrderKind

__all__ = ["SavePace"]

_SAVES = 5  # of the newest, whose median counts
_STEPS = 4096  # steps whose save may still be under way


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
        self._ended_at_s: dict[int, float] = {}
        self._delayed: set[int] = set()
        self._under_way: set[int] = set()
        self._saves: deque[tuple[int, SaveTimes]] = deque(maxlen=_SAVES)

    def begin(self, world_size: int) -> None:
        """A new World saves from here on."""
        self._world_size = world_size
        self._ended_at_s.clear()
        self._delayed.clear()
        self._under_way.clear()

    def on_signal(self, signal: Signal) -> None:
        match signal:
            case StepFinished(report=report):
                self._ended_at_s[report.step] = self._monotonic()
                if len(self._ended_at_s) > _STEPS:
                    del self._ended_at_s[min(self._ended_at_s)]
            case SaveDelayed(step=step):
                self._delayed.add(step)  # how long the store was away says nothing about the next save
            case SaveBound(bound=bound) if bound.kind is not OrderKind.PART:
                self._under_way.add(bound.step)
            case SaveFailed(step=step) | SaveSkipped(step=step):
                self._under_way.discard(step)
            case Committed(step=step):
                self._under_way.discard(step)
                self._take(signal)
            case _:
                pass

    def forecast(self) -> SaveForecast:
        """Of a save that the present World makes after those that are under way."""
        forecast, now = forecast_save(tuple(self._saves), self._world_size, self._config), self._monotonic()
        if not forecast.is_measured:
            return forecast  # a guess is counted once
        spent_s = (now - self._ended_at_s.get(step, now) for step in self._under_way)
        return replace(forecast, ahead_s=sum(max(0.0, forecast.full_s - one_s) for one_s in spent_s))

    def _take(self, commit: Committed) -> None:
        began_s = self._ended_at_s.get(commit.step)
        if began_s is None or commit.step in self._delayed:
            return
        least_s = commit.stall_s + commit.upload_s  # both Signals may come in one look
        write_s = max(least_s, self._monotonic() - began_s)
        times = SaveTimes(
            step=commit.step,
            stall_s=commit.stall_s,
            encode_s=0.0,
            upload_s=commit.upload_s,
            commit_s=0.0,
            write_s=write_s,
            stored_bytes=commit.stored_bytes,
            raw_bytes=0,
        )
        self._saves.append((self._world_size, times))
