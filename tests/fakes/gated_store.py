"""A MemoryStore whose puts wait at a gate, or fail, on request; it records who waits and in which order puts began."""

from __future__ import annotations

import threading

from storage.memory_store import MemoryStore


class GatedStore(MemoryStore):
    """Closed from the start: every put waits until `open_gate`. ``error`` makes every put fail instead."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("gated")
        self._error = error
        self._gate = threading.Event()
        self._changed = threading.Condition()
        self.begun: list[str] = []

    def put(self, key: str, data: bytes | memoryview, *, deadline_s: float = 60.0) -> None:
        with self._changed:
            self.begun.append(key)
            self._changed.notify_all()
        if self._error is not None:
            raise self._error
        if not self._gate.wait(timeout=30.0):
            raise AssertionError(f"the gate stayed closed for {key}")
        super().put(key, data, deadline_s=deadline_s)

    def open_gate(self) -> None:
        self._gate.set()

    def wait_for_puts(self, number: int, timeout_s: float = 20.0) -> None:
        """Return once ``number`` puts have begun."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.begun) >= number, timeout_s):
                raise AssertionError(f"{len(self.begun)} puts began, {number} expected")
