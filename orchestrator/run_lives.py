"""The Attempts of a Run as its events tell them: what each began from, made, and saved. Pure; never raises."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator.event_fields import Event, float_of, int_of, number_of, text_of

__all__ = ["Life", "MadeStep", "Track", "track_lives"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeStep:
    """``safe_step`` -1: memory held no step whole."""

    finished_s: float
    step_s: float
    safe_step: int


@dataclass(slots=True, kw_only=True)
class Life:
    """One Attempt; tables are by step. ``end`` says how it ended, "" while it goes on; ``fault`` what broke it.
    ``quarantined``: when Checkpoints of any Attempt were taken out of use while this one was the newest."""

    number: int
    cause: str
    restored_step: int
    restored_from: str
    began_s: float
    last_step: int
    end: str = ""
    fault: str = ""
    is_over: bool = False
    steps: dict[int, MadeStep] = field(default_factory=dict)
    bound: dict[int, Event] = field(default_factory=dict)
    committed: dict[int, Event] = field(default_factory=dict)
    skipped: dict[int, Event] = field(default_factory=dict)
    failed: dict[int, Event] = field(default_factory=dict)
    notes: dict[int, list[str]] = field(default_factory=dict)
    quarantined: dict[int, float] = field(default_factory=dict)
    weighings: list[Event] = field(default_factory=list)

    def is_concerned(self, step: int) -> bool:
        """Whether it made ``step``, or was ordered to save it."""
        return self.restored_step < step <= self.last_step or step in self.bound

    def add(self, event: Event) -> None:
        step = int_of(event, "step")
        match event.get("event"):
            case "step":
                self._add_step(step, event)
            case "left":
                self.last_step = max(self.last_step, step)
            case "save_bound":
                self.bound[step] = event
            case "committed":
                self.committed[step] = event
            case "save_skipped":
                self.skipped[step] = event
            case "save_failed":
                self.failed[step] = event
            case "save_weighed":
                self.weighings.append(event)
            case "save_slow":
                took = f"{float_of(event, 'seconds'):.1f} s, usual are {float_of(event, 'usual_s'):.1f} s"
                self.note(step, f"slow, {took}: {text_of(event, 'cause')}")
            case "save_delayed":
                self.note(step, f"the store failed it, and it was tried again: {text_of(event, 'reason')}")
            case "fault":
                self.fault = text_of(event, "cause")
            case "attempt_ended":
                self.last_step = max(self.last_step, int_of(event, "last_step"))
                self.end, self.is_over = text_of(event, "reason"), True
                if self.end and self.fault:
                    self.end += f" ({self.fault})"

    def note(self, step: int, text: str) -> None:
        notes = self.notes.setdefault(step, [])
        if text not in notes:
            notes.append(text)

    def _add_step(self, step: int, event: Event) -> None:
        finished_s, safe = number_of(event, "finished_s"), number_of(event, "safe_step")
        self.steps[step] = MadeStep(
            finished_s=float_of(event, "t_s") if finished_s is None else finished_s,
            step_s=number_of(event, "step_s") or 0.0,
            safe_step=-1 if safe is None else int(safe),
        )
        self.last_step = max(self.last_step, step)


@dataclass(slots=True, kw_only=True)
class Track:
    """``lives`` in the order in which they began."""

    run_id: str = ""
    total_steps: int = 0
    lives: list[Life] = field(default_factory=list)

    @property
    def newest_step(self) -> int:
        return max((life.last_step for life in self.lives), default=0)


def track_lives(events: Iterable[Event]) -> Track:
    """All Attempts of the newest history in ``events``."""
    track = Track()
    by_number: dict[int, Life] = {}
    for event in events:
        match event.get("event"):
            case "run_started":
                if event.get("is_new") is True:  # what stands before is of an older Run at the same place
                    track, by_number = Track(), {}
                track.run_id = text_of(event, "run_id")
                track.total_steps = int_of(event, "steps")
            case "attempt_started":
                life = _life_of(event)
                track.lives.append(life)
                by_number[life.number] = life
            case "quarantined":
                _note_quarantine(track, event)
            case "run_finished" if track.lives:
                track.lives[-1].is_over = True
            case _:
                number = event.get("attempt")
                life_of_it = by_number.get(number) if isinstance(number, int) else None
                if life_of_it is not None:
                    life_of_it.add(event)
    return track


def _life_of(event: Event) -> Life:
    restored = int_of(event, "restored_step")
    return Life(
        number=int_of(event, "attempt"),
        cause=text_of(event, "cause"),
        restored_step=restored,
        restored_from=text_of(event, "restored_from") or "none",
        began_s=float_of(event, "t_s"),
        last_step=restored,
    )


def _note_quarantine(track: Track, event: Event) -> None:
    step = int_of(event, "step")
    if track.lives:
        track.lives[-1].quarantined[step] = float_of(event, "t_s")
    for life in reversed(track.lives):
        if step in life.committed:
            life.note(step, f"taken out of use later: {text_of(event, 'reason')}")
            return
