"""A bell: wakes one waiting thread when any of many things happens, so that none of them is found by polling."""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["Bell"]


class Bell:
    """`ring` from any thread; `wait` by one. A ring that nobody waits for is kept for the next wait."""

    def __init__(self) -> None:
        self._rung = threading.Event()

    def ring(self) -> None:
        self._rung.set()

    def watch(self, ref: Any) -> Any:
        """Ring when the call behind this Ray reference is answered or has failed; returns the reference."""
        ref.future().add_done_callback(lambda _: self._rung.set())
        return ref

    def wait(self, timeout_s: float) -> None:
        """Until it rings, at most ``timeout_s``."""
        self._rung.wait(timeout_s)
        self._rung.clear()
