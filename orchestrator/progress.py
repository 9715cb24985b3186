"""Shows a Run while it goes: one live line on a terminal, plain lines elsewhere. Fed by events, decides nothing.

Everything goes to stderr: stdout belongs to the report and to `--json`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol, TextIO

from orchestrator.event_fields import Event
from orchestrator.event_lines import event_line
from orchestrator.run_status import RunStatus

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TextColumn

__all__ = ["ProgressView", "open_progress"]

_PLAIN_EVERY_STEPS = 10


class ProgressView(Protocol):
    """Where events and lines for people go."""

    def on_event(self, event: Event) -> None: ...

    def note(self, line: str) -> None:
        """A line that stays on the screen."""
        ...

    def close(self) -> None:
        """End the display; further calls do nothing."""
        ...


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
        from rich.progress import BarColumn, Progress, TimeElapsedColumn

        self._status = RunStatus(total_steps=total_steps)
        self._progress = Progress(
            BarColumn(bar_width=24),
            _status_column(self._status),
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


def _status_column(status: RunStatus) -> TextColumn:
    """The status line, and as time goes by without an event how long no step has come."""
    from rich.progress import Task, TextColumn
    from rich.text import Text

    class StatusColumn(TextColumn):
        def render(self, task: Task) -> Text:
            silence = status.silence()
            return Text(task.description if silence is None else f"{task.description} · {silence}")

    return StatusColumn("{task.description}", markup=False)
