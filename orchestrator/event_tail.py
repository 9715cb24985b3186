"""Follows an event file that other processes append to: whole lines only, each once."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["EventTail", "each_event", "events_in"]


class EventTail:
    """Reads what was appended since the last look. The file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """The events of all lines that were finished since; a torn or foreign line is passed over."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return events_in(whole)


def events_in(data: bytes) -> list[dict[str, Any]]:
    """The events of an event file, or of a part of one; a line that is torn, or none, is passed over."""
    return list(each_event(data))


def each_event(data: bytes) -> Iterator[dict[str, Any]]:
    """`events_in`, one at a time: parsed, those of a long Run take many times the bytes of the file."""
    for line in io.BytesIO(data):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            yield event
