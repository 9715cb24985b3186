"""The pulse of a training thread: what it is doing, at which step, and when it last made progress.

Written by the training thread, read from any other. It judges nothing: limits belong to the driver.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from workers.contract import Phase, Restored

__all__ = ["Pulse", "PulseReading"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PulseReading:
    """One consistent look at a Pulse. ``spent_s``: the phases that have been left since the last FORMING, with their
    length."""

    phase: Phase
    step: int
    age_s: float
    restored: Restored | None = None
    spent_s: Mapping[Phase, float] = field(default_factory=dict)


class Pulse:
    """Phase, step and time of last progress, changed together."""

    def __init__(self, *, phase: Phase = Phase.STARTING, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._phase, self._step, self._beat_at = phase, 0, clock()
        self._phase_began_at = self._beat_at
        self._spent_s: dict[Phase, float] = {}
        self._restored: Restored | None = None

    def beat(self, phase: Phase | None = None, *, step: int | None = None) -> None:
        """Progress was made; None keeps the phase or the step."""
        with self._lock:
            self._beat_at = self._clock()
            self._step = self._step if step is None else step
            if phase is not None and phase is not self._phase:
                self._enter(phase)

    def _enter(self, phase: Phase) -> None:
        left, self._phase = self._phase, phase
        if phase is Phase.FORMING:
            self._spent_s.clear()
        else:
            self._spent_s[left] = self._spent_s.get(left, 0.0) + self._beat_at - self._phase_began_at
        self._phase_began_at = self._beat_at

    def restored(self, restored: Restored) -> None:
        """The state of an Attempt was loaded; said with every look until the next one is."""
        with self._lock:
            self._restored = restored
            self._beat_at = self._clock()

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """The phase for the length of a block; the one before it comes back after."""
        before = self.read().phase
        self.beat(phase)
        try:
            yield
        finally:
            self.beat(before)

    def read(self) -> PulseReading:
        with self._lock:
            age_s = max(0.0, self._clock() - self._beat_at)
            return PulseReading(
                phase=self._phase,
                step=self._step,
                age_s=age_s,
                restored=self._restored,
                spent_s=dict(self._spent_s),
            )
