"""What one run's events tell a drill: the steps that count, the faults that struck, the recoveries. Pure; never raises.

A step that a later Attempt rolled back does not count: the one that was made again in its place does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from orchestrator.drill_reach import Reach, Target, read_reach
from orchestrator.event_fields import Event, float_of, int_of, text_of
from orchestrator.summary import AttemptSummary, begins_history, summarize

__all__ = ["EVAL_LOSS", "History", "Strike", "read_history"]

EVAL_LOSS = "eval_loss"

_DRIVER_RESTART = "driver-restart"
_AFTERMATHS = frozenset({"drain-deadline", "slow-node-over", "disk-full-over", "store-outage-over"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A fault that really happened. ``index``: its place among the events. ``target``: what it was done to."""

    verb: str
    planned_step: int
    at_step: int
    detail: str
    index: int
    target: Target

    def __str__(self) -> str:
        return f"{self.verb} at step {self.at_step}{f' ({self.detail})' if self.detail else ''}"


@dataclass(slots=True, kw_only=True)
class History:
    """``steps``: the last event of each step that counts, with the loss of its evaluation where one was made, and
    ``places`` where among the events it stands. ``untold``: steps whose events died with a driver although a Checkpoint
    holds them."""

    steps: dict[int, Event] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    evals: dict[int, float] = field(default_factory=dict)
    untold: set[int] = field(default_factory=set)
    strikes: list[Strike] = field(default_factory=list)
    attempts: Sequence[AttemptSummary] = ()
    reach: Reach = field(default_factory=Reach)
    weights_digest: str | None = None
    status: str = "running"
    exit_reason: str = ""

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)

    @property
    def recoveries(self) -> Sequence[AttemptSummary]:
        """Every Attempt after the first."""
        return self.attempts[1:]

    @property
    def num_rolled_back(self) -> int:
        """Finished steps that were made again, those included whose events nobody had written yet."""
        return sum(attempt["lost_steps"] for attempt in self.attempts)

    def world_size(self, step: int) -> int:
        return int_of(self.steps[step], "world_size")

    def strike_before(self, step: int) -> Strike | None:
        """The last fault before ``step`` was made as it counts, those that interrupted nothing left out."""
        place, idle = self.places.get(step, 0), self.idle_strikes
        return next((strike for strike in reversed(self.strikes) if strike.index < place and strike not in idle), None)

    @property
    def idle_strikes(self) -> list[Strike]:
        """Those that should have interrupted the training and did not."""
        return [strike for strike in self.strikes if self.reach.has_interrupted(strike.target) is False]

    def attempt_of(self, step: int) -> AttemptSummary | None:
        """The Attempt that made ``step`` as it counts."""
        number = int_of(self.steps[step], "attempt")
        return next((one for one in reversed(self.attempts) if one["attempt"] == number), None)


def read_history(events: Iterable[Event]) -> History:
    """Of the newest Run in ``events``, in the order of writing."""
    listed = list(events)
    begin = max((index for index, event in enumerate(listed) if begins_history(event)), default=0)
    history = History()
    newest_attempt = 0
    told = 0
    for index, event in enumerate(listed[begin:], start=begin):
        step = int_of(event, "step")
        match event.get("event"):
            case "attempt_started":
                newest_attempt = max(newest_attempt, int_of(event, "attempt"))
                restored = int_of(event, "restored_step")
                if event.get("cause") == _DRIVER_RESTART:
                    history.untold |= set(range(told + 1, restored + 1))
                told = min(told, restored)  # what was rolled back is to be told again
                _forget_after(history, restored)
            case "step" if int_of(event, "attempt") >= newest_attempt:
                history.steps[step], history.places[step] = event, index
                history.untold.discard(step)
                told = max(told, step)
            case "eval" if int_of(event, "attempt") >= newest_attempt:
                history.evals[step] = float_of(event, "loss")
            case "chaos" if event.get("verb") not in _AFTERMATHS:
                history.strikes.append(_strike(event, index))
            case "run_finished":
                digest = event.get("weights_digest")
                history.weights_digest = digest if isinstance(digest, str) else None
                history.status, history.exit_reason = text_of(event, "status"), text_of(event, "exit_reason")
    for step in history.evals.keys() & history.steps.keys():
        history.steps[step] = {**history.steps[step], EVAL_LOSS: history.evals[step]}
    history.attempts = summarize(listed[begin:])["attempts"]
    history.reach = read_reach(listed[begin:])
    return history


def _forget_after(history: History, restored_step: int) -> None:
    gone = [step for step in history.steps if step > restored_step]
    history.evals = {step: loss for step, loss in history.evals.items() if step <= restored_step}
    history.untold = {step for step in history.untold if step <= restored_step}
    for step in gone:
        del history.steps[step], history.places[step]


def _strike(event: Event, index: int) -> Strike:
    return Strike(
        verb=text_of(event, "verb"),
        planned_step=int_of(event, "planned_step"),
        at_step=int_of(event, "at_step"),
        detail=text_of(event, "detail"),
        index=index,
        target=Target(
            verb=text_of(event, "verb"),
            node_id=text_of(event, "node_id"),
            pid=int_of(event, "pid"),
            at_s=float_of(event, "t_s"),
        ),
    )
