"""Which Checkpoints were verified in the background, and for how long the newest ones have not been. Pure.

Unverified counts from the first Commit after the newest verified one: a Run that commits often would else always look
young.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypedDict

from orchestrator.event_fields import Event, int_of, number_of, text_of

__all__ = ["VerifiedFold", "VerifiedSummary"]

_SAID_FROM_S: Final = 60.0
_SILENT: Final = ("", "off")
_KEPT: Final = 256  # of either kind: a driver may run for months


class VerifiedSummary(TypedDict):
    """``mode``: `load`, `digests` or `off`, empty where nobody said. ``unverified_s`` None: nothing is unverified."""

    mode: str
    newest_step: int | None
    by: str | None
    verified: int
    failed: list[int]
    unverified_s: float | None


@dataclass(slots=True)
class VerifiedFold:
    """Takes events one by one."""

    _mode: str = ""
    _clock_s: float = 0.0
    _verified: dict[int, str] = field(default_factory=dict)
    _num_verified: int = 0
    _failed: list[int] = field(default_factory=list)
    _waiting_since_s: dict[int, float] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        times = (number_of(event, name) or 0.0 for name in ("t_s", "finished_s"))
        self._clock_s = max(self._clock_s, *times)
        step = int_of(event, "step")
        match event.get("event"):
            case "verifying":
                self._mode = text_of(event, "by")
            case "attempt_started":
                self._forget_after(int_of(event, "restored_step"))
            case "committed":
                if self._mode not in _SILENT and len(self._waiting_since_s) < _KEPT:  # how old the oldest is, matters
                    self._waiting_since_s[step] = self._clock_s
            case "verified":
                self._waiting_since_s.pop(step, None)
                self._verified[step] = text_of(event, "by")
                self._num_verified += 1
                self._forget_before()
            case "verify_failed":
                self._failed += [] if step in self._failed else [step]
                self._waiting_since_s.pop(step, None)
            case "quarantined":
                self._waiting_since_s.pop(step, None)
                self._verified.pop(step, None)

    def result(self) -> VerifiedSummary:
        newest = self.newest_step
        return VerifiedSummary(
            mode=self._mode,
            newest_step=newest,
            by=None if newest is None else self._verified[newest],
            verified=self._num_verified,
            failed=list(self._failed),
            unverified_s=None if (age := self.unverified_s) is None else round(age, 3),
        )

    @property
    def newest_step(self) -> int | None:
        return max(self._verified, default=None)

    @property
    def unverified_s(self) -> float | None:
        if self._mode in _SILENT:
            return None
        newest = -1 if self.newest_step is None else self.newest_step
        since = [at_s for step, at_s in self._waiting_since_s.items() if step > newest]
        return self._clock_s - min(since) if since else None

    def words(self) -> str | None:
        """For the status line; None where nothing is to be said."""
        if self._mode in _SILENT:
            return None
        age_s = self.unverified_s
        parts = [] if self.newest_step is None else [f"verified {self.newest_step}"]
        if age_s is not None and age_s >= _SAID_FROM_S:
            parts.append(f"unverified for {age_s:.0f} s")
        return ", ".join(parts) or None

    def _forget_before(self) -> None:
        """What no quarantine of newer ones brings up again; some of it was deleted unverified, and nobody says so."""
        if len(self._verified) < _KEPT and len(self._waiting_since_s) < _KEPT:
            return
        newest = max(self._verified)
        steps = sorted(self._verified)[-_KEPT // 2 :]
        self._verified = {step: self._verified[step] for step in steps}
        self._waiting_since_s = {step: at_s for step, at_s in self._waiting_since_s.items() if step > newest}

    def _forget_after(self, step: int) -> None:
        self._verified = {one: by for one, by in self._verified.items() if one <= step}
        self._waiting_since_s = {one: at_s for one, at_s in self._waiting_since_s.items() if one <= step}
