"""Shows a Run while it goes: one live line on a terminal, plain lines elsewhere. Fed by events, decides nothing.

Everything goes to stderr: stdout belongs to the report and to `--json`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TextIO

from orchestrator.report_text import count
from orchestrator.restored import restored_words
from orchestrator.save_summary import is_routine, next_try_words, policy_of
from orchestrator.summary import Event
from orchestrator.verified_fold import VerifiedFold

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["ProgressView", "RunStatus", "event_line", "open_progress"]

_PLAIN_EVERY_STEPS = 10
_SAID_EVERY_S = 60.0


class ProgressView(Protocol):
    """Where events and lines for people go."""

    def on_event(self, event: Event) -> None: ...

    def note(self, line: str) -> None:
        """A line that stays on the screen."""
        ...

    def close(self) -> None:
        """End the display; further calls do nothing."""
        ...


@dataclass(slots=True)
class RunStatus:
    """The newest facts, as one line. ``total_steps`` 0: not known yet."""

    total_steps: int = 0
    step: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None
    world_size: int = 0
    wanted_workers: int = 0
    committed_step: int | None = None
    safe_step: int | None = None
    phase: str = "starting"
    is_store_away: bool = False
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
        self._clock_s = max(self._clock_s, _span(event, "t_s"), _span(event, "finished_s"))
        match event.get("event"):
            case "run_started":
                self.total_steps = _number(event, "steps", self.total_steps)
            case "attempt_started":
                self.phase, self.world_size = "forming", _number(event, "world_size", self.world_size)
                self.wanted_workers = _number(event, "wanted_workers", self.world_size)
                self.step, self._tokens = _number(event, "restored_step", self.step), None
                self._base_step, self._durable_s, self._finished_s = self.step, None, None
                self._know_committed(event)
                self.safe_step = None
                self._bound.clear()
            case "decision":
                self.wanted_workers = _number(event, "workers", self.wanted_workers)
            case "regrouped":
                self.phase = "loading"
            case "step":
                self._add_step(event)
            case "save_bound":
                self._bound[_number(event, "step", 0)] = None
                self._add_order(event)
            case "committed":
                self._add_commit(_number(event, "step", 0))
            case "data_awaited":
                self.phase = "waiting for data"
            case "checkpointing" | "evaluating" as phase:
                self.phase = phase
            case "store_away":
                self.is_store_away = True
                self._away_since_s = None if self._finished_s is None else self._finished_s - _span(event, "away_s")
            case "store_back":
                self.is_store_away = False
            case "save_skipped":
                self._add_skip()
            case "fault":
                self.phase = "regrouping"
            case "waiting":
                self.phase = "waiting for nodes"
            case "attempt_ended" if event.get("reason") == "finished":
                self.phase = "saving"
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

    def _know_committed(self, event: Event) -> None:
        """What an Attempt goes on from may have been committed by a driver of which nothing else was seen here."""
        durable = event.get("durable_step")
        if isinstance(durable, int):
            self.committed_step = durable or None
        elif event.get("restored_from") in ("local-disk", "object-storage"):
            self.committed_step = _number(event, "restored_step", 0)

    def _add_commit(self, step: int) -> None:
        self.committed_step = self._base_step = step
        self._durable_s = self._bound.get(step) or self._finished_s
        self._bound = {bound: at_s for bound, at_s in self._bound.items() if bound > step}

    def _add_step(self, event: Event) -> None:
        self.phase = "training"
        self._finished_s = _seconds(event, "finished_s")
        if self._durable_s is None:
            self._durable_s = self._finished_s
        if event.get("step") in self._bound:
            self._bound[_number(event, "step", 0)] = self._finished_s
        self.step = _number(event, "step", self.step)
        safe = _number(event, "safe_step", -1)
        self.safe_step = safe if safe >= 0 else self.safe_step
        self.world_size = _number(event, "world_size", self.world_size)
        loss, seconds = event.get("loss"), event.get("step_s")
        self.loss = float(loss) if isinstance(loss, int | float) else None
        tokens = _number(event, "tokens", 0)
        if self._tokens is not None and isinstance(seconds, int | float) and seconds > 0:
            self.tokens_per_s = (tokens - self._tokens) / seconds
        self._tokens = tokens

    def line(self) -> str:
        """E.g. ``step 40/120 · loss 5.213 · 2,214 tokens/s · 4 workers · committed 30 · 10 steps (8 s) at risk``."""
        parts = [f"step {self.step}/{self.total_steps}" if self.total_steps else f"step {self.step}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.3f}")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        if self.world_size:
            wanted = f" of {self.wanted_workers}" if self.wanted_workers > self.world_size else ""
            parts.append(f"{self.world_size}{wanted} worker{'s' if self.world_size > 1 or wanted else ''}")
        parts.append("no checkpoint yet" if self.committed_step is None else f"committed {self.committed_step}")
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


def event_line(event: Event) -> str | None:
    """The line a person should see for this event; None for the routine ones."""
    match event.get("event"):
        case "chaos":
            where = f" on {event['detail']}" if event.get("detail") else ""
            return f"chaos: {event.get('verb')} at step {event.get('at_step')}{where}"
        case "fault":
            return f"fault: {event.get('cause')}: {event.get('detail')}"
        case "attempt_started":
            start = f"from step {event.get('restored_step')} ({event.get('restored_from')})"
            lost = _number(event, "lost_steps", 0)
            again = f", {count(lost, 'step')} run again" if lost else ""
            why = f"attempt {event.get('attempt')} ({event.get('cause')})"
            return f"{why}: {count(_number(event, 'world_size', 0), 'worker')}, {start}{again}"
        case "request":
            to = f" to {count(_number(event, 'workers', 0), 'worker')}" if event.get("workers") else ""
            return f"asked by {event.get('made_by') or 'someone'}: {event.get('wish')}{to}"
        case "decision" if event.get("decision") in ("keep", "refuse"):
            return str(event.get("reason"))
        case "node_blocked":
            return f"node {str(event.get('node'))[:12]} is not used any more: {event.get('reason')}"
        case "restored":
            return f"restored step {event.get('step')}: {restored_words(event)}"
        case "memory_tier":
            return f"memory tier: {event.get('mode')}: {event.get('reason')}"
        case "memory_degraded":
            return f"memory tier: node {str(event.get('node'))[:12]} has no replica: {event.get('reason')}"
        case "memory_passed_over":
            return f"nothing in memory to go on from, step {event.get('step')} is read instead: {event.get('reason')}"
        case "waiting":
            return f"waiting: {event.get('have')} of {event.get('need')} workers; {event.get('missing')}"
        case "data_awaited":
            return f"the training data does not come: ranks {event.get('ranks')} wait for its store"
        case "checkpointing" | "evaluating" as phase:
            return f"{phase} at step {event.get('step')} takes long: ranks {event.get('ranks')} are at it"
        case "store_away":
            return f"the store is away, training goes on: {event.get('reason')}"
        case "work_at_risk":
            risk = f"{count(_number(event, 'at_risk_steps', 0), 'step')} ({_whole(event, 'at_risk_s')} s) at risk"
            away = f"the store has been away for {_whole(event, 'away_s')} s"
            return f"{away}: {risk} since step {event.get('durable_step')}"
        case "store_back":
            missed = f"{event.get('saves_failed')} failed, {event.get('saves_skipped')} skipped"
            newest = f"the newest checkpoint is of step {event.get('durable_step')}"
            return f"the store is back after {_whole(event, 'away_s')} s: {newest}; saves meanwhile: {missed}"
        case "save_bound" if not is_routine(str(event.get("reason") or "cadence")):
            return _order_line(event)
        case "threshold_moved":
            moved = f"{_short(event, 'old')} -> {_short(event, 'new')}"
            return f"the threshold of instability moved, {moved}: {event.get('why')}"
        case "save_share" if event.get("why"):
            return f"a save is large for this machine's memory: {event['why']}"
        case "save_slow":
            usual = f"{_whole(event, 'seconds')} s, usual are {_whole(event, 'usual_s')} s"
            return f"save of step {event.get('step')} is slow ({usual}): {event.get('cause')}"
        case "attempt_ended" if event.get("reason") == "finished":
            return f"step {event.get('last_step')} is trained; waiting until its checkpoint is committed"
        case "save_failed":
            return f"save of step {event.get('step')} failed: {event.get('reason')}{next_try_words(event)}"
        case "save_skipped":
            return f"save of step {event.get('step')} skipped: {event.get('reason')}"
        case "quarantined":
            return f"checkpoint of step {event.get('step')} taken out of use: {event.get('key')}: {event.get('reason')}"
        case "verifying" if event.get("reason") is not None:
            return f"checkpoints are verified by their digests alone: {event['reason']}"
        case "verify_failed":
            return f"CHECKPOINT OF STEP {event.get('step')} IS BAD: {event.get('key')}: {event.get('reason')}"
        case "verify_stopped":
            return f"checkpoints are not verified any more: {event.get('reason')}"
        case "eval":
            return f"eval at step {event.get('step')}: loss {_figure(event, 'loss')}, best {_figure(event, 'best')}"
        case "run_finished":
            return f"run {event.get('status')}: {event.get('exit_reason')}".partition("\n")[0]  # the report has it all
        case _:
            return None


def open_progress(*, total_steps: int = 0, is_shown: bool = True, stream: TextIO | None = None) -> ProgressView:
    """The view that fits ``stream`` (default: stderr): live on a terminal, plain lines elsewhere, or none."""
    if not is_shown:
        return _NoProgress()
    stream = stream or sys.stderr
    if not stream.isatty():
        return _PlainProgress(total_steps, stream)
    from rich.console import Console

    return _LiveProgress(total_steps, Console(file=stream))


class _NoProgress:
    def on_event(self, event: Event) -> None: ...

    def note(self, line: str) -> None: ...

    def close(self) -> None: ...


class _PlainProgress:
    """One line every few steps and for each event of note."""

    def __init__(self, total_steps: int, stream: TextIO) -> None:
        self._status = RunStatus(total_steps=total_steps)
        self._stream = stream
        self._is_open = True

    def on_event(self, event: Event) -> None:
        self._status.add(event)
        line = None if self._status.is_said_already(event) else event_line(event)
        if line is not None:
            self.note(line)
        step, total = self._status.step, self._status.total_steps
        if event.get("event") == "step" and (step % _PLAIN_EVERY_STEPS == 0 or step in (1, total)):
            self.note(self._status.line())

    def note(self, line: str) -> None:
        if self._is_open:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        self._is_open = False


class _LiveProgress:
    """A bar and the status line, redrawn in place; events of note scroll by above it."""

    def __init__(self, total_steps: int, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._status = RunStatus(total_steps=total_steps)
        self._progress = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=console,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task(self._status.line(), total=total_steps or None)
        self._progress.start()
        self._is_open = True

    def on_event(self, event: Event) -> None:
        self._status.add(event)
        line = None if self._status.is_said_already(event) else event_line(event)
        if line is not None:
            self.note(line)
        total = self._status.total_steps or None
        self._progress.update(self._task, description=self._status.line(), completed=self._status.step, total=total)

    def note(self, line: str) -> None:
        if self._is_open:
            self._progress.console.print(line, markup=False, highlight=False)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._progress.stop()


def _number(event: Event, key: str, default: int) -> int:
    value = event.get(key)
    return int(value) if isinstance(value, int | float) else default


def _order_line(event: Event) -> str:
    """E.g. ``save at step 40: hazard: 12 min since commit, MTBF 41 min, cost 3.1 s``."""
    step, reason = event.get("step"), event.get("reason")
    match event.get("kind"):
        case "leave":
            return f"leaving at step {step} with a save: {reason}"
        case "leave_bounded":
            return f"leaving at step {step} with a save in its bounded form: {reason}"
        case "part":
            return f"leaving at step {step}, which memory holds: {reason}"
        case _:
            return f"save at step {step}: {reason}"


def _figure(event: Event, key: str) -> str:
    value = event.get(key)
    return f"{value:.3f}" if isinstance(value, int | float) else "?"


def _short(event: Event, key: str) -> str:
    value = event.get(key)
    return f"{value:.3g}" if isinstance(value, int | float) else "?"


def _whole(event: Event, key: str) -> str:
    value = event.get(key)
    return f"{value:.0f}" if isinstance(value, int | float) else "?"


def _span(event: Event, key: str) -> float:
    return _seconds(event, key) or 0.0


def _seconds(event: Event, key: str) -> float | None:
    value = event.get(key)
    return float(value) if isinstance(value, int | float) else None
