"""The newest facts of a Run as one line, folded from its events; and which events are no news by now."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from orchestrator.event_fields import Event, float_of, int_of, number_of, texts_of
from orchestrator.save_summary import policy_of
from orchestrator.verified_fold import VerifiedFold

__all__ = ["RunStatus"]

_SAID_EVERY_S = 60.0
_NAMED = 2
_STEPS = 20  # of the newest, whose median is the usual time
_SILENT_S, _SILENT_STEPS = 5.0, 5  # without a step: clearly longer than usual


@dataclass(slots=True)
class RunStatus:
    """The newest facts, as one line. ``total_steps`` 0: not known yet. ``monotonic``: when an event has come."""

    total_steps: int = 0
    monotonic: Callable[[], float] = time.monotonic
    step: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None
    world_size: int = 0
    wanted_workers: int = 0
    committed_step: int | None = None
    safe_step: int | None = None
    phase: str = "starting"
    is_store_away: bool = False
    _is_known: bool = False  # which Checkpoint there is, if any
    _is_resuming: bool = False
    _silent: str = ""  # who does not answer
    _stepped_at_s: float | None = None  # None: no step is to be expected
    _usual_s: float | None = None
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))
    _tokens: int | None = None
    _finished_s: float | None = None
    _base_step: int = 0
    _durable_s: float | None = None
    _away_since_s: float | None = None
    _is_skip_news: bool = False
    _skip_said_s: float | None = None
    _clock_s: float = 0.0
    _is_save_news: bool = False
    _save_said_s: dict[str, float] = field(default_factory=dict)
    _bound: dict[int, float | None] = field(default_factory=dict)
    _verified: VerifiedFold = field(default_factory=VerifiedFold)

    def add(self, event: Event) -> None:
        self._verified.add(event)
        self._clock_s = max(self._clock_s, float_of(event, "t_s"), float_of(event, "finished_s"))
        match event.get("event"):
            case "run_started":
                self.total_steps = _number(event, "steps", self.total_steps)
            case "driver_started":
                self._add_driver(event)
            case "attempt_started":
                self._add_attempt(event)
            case "decision":
                self.wanted_workers = _number(event, "workers", self.wanted_workers)
            case "regrouped":
                self.phase = "loading"
            case "step":
                self._add_step(event)
            case "save_bound":
                self._bound[int_of(event, "step")] = None
                self._add_order(event)
            case "committed":
                self._add_commit(int_of(event, "step"))
            case "quarantined" if int_of(event, "step") == self.committed_step:
                self.committed_step, self._is_known = None, False  # an older one may be there
            case "data_awaited":
                self.phase = "waiting for data"
            case "checkpointing" | "evaluating" as phase:
                self.phase = phase
            case "store_away":
                self.is_store_away = True
                self._away_since_s = None if self._finished_s is None else self._finished_s - float_of(event, "away_s")
            case "store_back":
                self.is_store_away = False
            case "save_skipped":
                self._add_skip()
            case "worker_silent":
                others = int_of(event, "num_workers") - _NAMED
                more = f" and {others} more" if others > 0 else ""
                self._silent = f"no answer from {', '.join(texts_of(event, 'workers')[:_NAMED])}{more}"
            case "fault":
                self.phase, self._silent = "regrouping", ""
            case "waiting":
                self.phase = "waiting for nodes"
            case "attempt_ended":
                self._stepped_at_s, self._silent = None, ""
                self.phase = "saving" if event.get("reason") == "finished" else self.phase
            case "run_finished":
                self.phase = str(event.get("status", "finished"))

    def is_said_already(self, event: Event) -> bool:
        """Each missed save of an outage is counted when the outage ends; saying them one by one tells nothing more.
        Nor do skipped ones where saves are due faster than they can be stored, nor the saves of one eager policy: one
        a minute is said."""
        if event.get("event") == "save_bound":
            return not self._is_save_news
        if event.get("event") == "save_skipped":
            return self.is_store_away or not self._is_skip_news
        return self.is_store_away and event.get("event") == "save_failed"

    def _add_order(self, event: Event) -> None:
        kind = str(event.get("kind", ""))
        policy = policy_of(str(event.get("reason", "")), kind)
        said_s = self._save_said_s.get(policy)
        # Leaving ends an Attempt: it is always news.
        self._is_save_news = kind != "snapshot" or said_s is None or self._clock_s - said_s >= _SAID_EVERY_S
        if self._is_save_news:
            self._save_said_s[policy] = self._clock_s

    def _add_skip(self) -> None:
        now_s = self._finished_s or 0.0
        self._is_skip_news = self._skip_said_s is None or now_s - self._skip_said_s >= _SAID_EVERY_S
        if self._is_skip_news and not self.is_store_away:
            self._skip_said_s = now_s

    def _add_driver(self, event: Event) -> None:
        """What the driver found of the Run. The Run goes on from the newest Checkpoint, or from what memory holds."""
        durable = event.get("durable_step")
        if isinstance(durable, int):
            self.committed_step, self._is_known = durable or None, True
        self.step = self._base_step = _number(event, "reached_step", self.step)
        self._is_resuming = self.step > 0 or self.committed_step is not None
        self.phase, self.world_size, self.loss, self.tokens_per_s = "starting", 0, None, None
        self._silent = ""
        self.safe_step = self._stepped_at_s = None

    def _add_attempt(self, event: Event) -> None:
        self.phase, self.world_size = "forming", _number(event, "world_size", self.world_size)
        self.wanted_workers = _number(event, "wanted_workers", self.world_size)
        self.step, self._tokens = _number(event, "restored_step", self.step), None
        self._base_step, self._durable_s, self._finished_s = self.step, None, None
        self._know_committed(event)
        self.safe_step = self._stepped_at_s = None
        self._is_resuming, self._silent = False, ""
        self._bound.clear()
        self._steps_s.clear()

    def _know_committed(self, event: Event) -> None:
        """What an Attempt goes on from may have been committed by a driver of which nothing else was seen here."""
        durable = event.get("durable_step")
        if isinstance(durable, int):
            self.committed_step, self._is_known = durable or None, True
        elif event.get("restored_from") in ("local-disk", "object-storage"):
            self.committed_step, self._is_known = int_of(event, "restored_step"), True
        elif not int_of(event, "restored_step"):
            self._is_known = True

    def _add_commit(self, step: int) -> None:
        self.committed_step, self._is_known = step, True
        self._base_step = step
        self._durable_s = self._bound.get(step) or self._finished_s
        self._bound = {bound: at_s for bound, at_s in self._bound.items() if bound > step}

    def _add_step(self, event: Event) -> None:
        self.phase, self._silent = "training", ""
        self._finished_s = number_of(event, "finished_s")
        if self._durable_s is None:
            self._durable_s = self._finished_s
        if event.get("step") in self._bound:
            self._bound[int_of(event, "step")] = self._finished_s
        self.step = _number(event, "step", self.step)
        safe = _number(event, "safe_step", -1)
        self.safe_step = safe if safe >= 0 else self.safe_step
        self.world_size = _number(event, "world_size", self.world_size)
        loss, seconds = event.get("loss"), event.get("step_s")
        self._pace(number_of(event, "step_s"))
        self.loss = float(loss) if isinstance(loss, int | float) else None
        tokens = int_of(event, "tokens")
        if self._tokens is not None and isinstance(seconds, int | float) and seconds > 0:
            self.tokens_per_s = (tokens - self._tokens) / seconds
        self._tokens = tokens

    def _pace(self, step_s: float | None) -> None:
        is_first, self._stepped_at_s = self._stepped_at_s is None, self.monotonic()
        if step_s is None:
            return
        if not is_first:
            self._steps_s.append(step_s)
            self._usual_s = median(self._steps_s)
        elif self._usual_s is None:  # a World's first step is no measure, yet better than none
            self._usual_s = step_s

    def silence(self) -> str | None:
        """Where no step has come for clearly longer than usual: for how long, and who does not answer. Says so at any
        time, without an event."""
        began_s, usual_s = self._stepped_at_s, self._usual_s
        parts = [self._silent] if self._silent else []
        if self.phase == "training" and began_s is not None and usual_s is not None:
            silent_s = self.monotonic() - began_s
            if silent_s > max(_SILENT_S, _SILENT_STEPS * usual_s):
                parts.insert(0, f"no step for {silent_s:.0f} s")
        return ", ".join(parts) or None

    def last_words(self) -> str:
        """Of a driver that could not say them itself, and whose cluster ends with it: from where the Run goes on."""
        if not self._is_known:
            return "the same command goes on from the newest checkpoint, if there is one"
        if self.committed_step is None:
            return "no checkpoint was committed, so the same command begins anew"
        words = [f"newest checkpoint: step {self.committed_step}"]
        if self.step > self.committed_step:
            first = self.committed_step + 1
            words.append(f"step{'' if first == self.step else f's {first} to'} {self.step} will be trained again")
        return "; ".join([*words, "the same command goes on from there"])

    def line(self) -> str:
        """E.g. ``step 40/120 · loss 5.213 · 2,214 tokens/s · 4 workers · committed 30 · 10 steps (8 s) at risk``."""
        parts = []
        if self._is_known or self.step:
            of = f"/{self.total_steps}" if self.total_steps else ""
            head = f"step {self.step}{of}"
            parts.append(f"resuming: {head} reached" if self._is_resuming else head)
        if self.loss is not None:
            parts.append(f"loss {self.loss:.3f}")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        if self.world_size:
            wanted = f" of {self.wanted_workers}" if self.wanted_workers > self.world_size else ""
            parts.append(f"{self.world_size}{wanted} worker{'s' if self.world_size > 1 or wanted else ''}")
        if self.committed_step is not None:
            parts.append(f"committed {self.committed_step}")
        elif self._is_known:
            parts.append("no checkpoint yet")
        if (verified := self._verified.words()) is not None:
            parts.append(verified)
        at_risk = self.step - self._base_step
        if self.safe_step is not None:
            parts.append(f"{self.safe_step} in memory")  # a lost node costs what came after, the loss of all more
            at_risk = self.step - max(self._base_step, self.safe_step)
            if at_risk > 0:
                parts.append(f"{at_risk} step{'s' if at_risk > 1 else ''} at risk")
        elif at_risk > 0:
            parts.append(f"{at_risk} step{'s' if at_risk > 1 else ''}{self._since(self._durable_s)} at risk")
        if self.is_store_away:
            parts.append(f"STORE AWAY{self._since(self._away_since_s)}")
        parts.append(self.phase)
        return " · ".join(parts)

    def _since(self, began_s: float | None) -> str:
        if began_s is None or self._finished_s is None:
            return ""
        return f" ({self._finished_s - began_s:.0f} s)"


def _number(event: Event, key: str, default: int) -> int:
    value = event.get(key)
    return int(value) if isinstance(value, int | float) else default
