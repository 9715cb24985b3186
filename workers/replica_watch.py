"""One rank's side thread that asks its Keeper which generations have their replicas. It makes none."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Final

from storage.errors import StorageError
from storage.keeper_protocol import LeaseRequest, MemoryPort, MemoryProgress

__all__ = ["ReplicaWatch"]

_log = logging.getLogger(__name__)
_WATCH_S: Final = 2.0  # one question
_AWAY_S: Final = 0.5  # before a replica that cannot be made is asked for again
_NUM_WATCHED: Final = 3  # as many as a rank holds
_REMEMBERED: Final = 32


class ReplicaWatch:
    """One Attempt's. Asks for one generation after the other, in the order in which they are sealed and replicated."""

    def __init__(self, keeper: MemoryPort, name: str) -> None:
        self._keeper, self._name = keeper, name
        self._changed = threading.Condition()
        self._unproven: deque[LeaseRequest] = deque(maxlen=_NUM_WATCHED)
        self._replicated: deque[int] = deque(maxlen=_REMEMBERED)
        self._lost: deque[int] = deque(maxlen=_REMEMBERED)
        self._is_closing = False
        self._has_said = False
        self._thread = threading.Thread(target=self._run, name=f"{name}-replicas", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, request: LeaseRequest) -> None:
        """The generation of ``request`` has been sealed."""
        with self._changed:
            self._unproven.append(request)
            self._changed.notify_all()

    def is_replicated(self, step: int) -> bool:
        """Whether the generation of ``step`` is known to have its replica."""
        with self._changed:
            return step in self._replicated

    def is_lost(self, step: int) -> bool:
        """Whether the generation of ``step`` died with its Keeper: the one that answers now was never given it."""
        with self._changed:
            return step in self._lost

    def close(self) -> None:
        """The thread ends after its last call."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread, after `close`."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._watch()
        except Exception:  # noqa: BLE001  the outermost edge: no step becomes safe any more, and training goes on
            _log.exception("%s: nobody asks any more which generations have their replicas", self._name)

    def _watch(self) -> None:
        while (request := self._next()) is not None:
            asked_at = time.monotonic()
            progress = self._ask(request)
            proven = -1 if progress is None else progress.replicated_step
            with self._changed:
                is_lost = progress is not None and progress.sealed_step < request.step
                if (is_lost or proven >= request.step) and request in self._unproven:
                    self._unproven.remove(request)
                if is_lost:
                    self._lost.append(request.step)
                if proven == request.step:  # of one that was overtaken it is not known
                    self._replicated.append(proven)
                elif not is_lost and proven < request.step and time.monotonic() - asked_at < _AWAY_S:
                    self._changed.wait_for(lambda: self._is_closing, _AWAY_S)

    def _ask(self, request: LeaseRequest) -> MemoryProgress | None:
        """How far the Keeper is; None: it does not say."""
        try:
            progress = self._keeper.wait_replicated(request.attempt, request.rank, request.step, _WATCH_S)
        except StorageError as error:
            if not self._has_said:
                _log.warning("%s step %d: its replica is not known of: %s", self._name, request.step, error)
            self._has_said = True
            return None
        self._has_said = False
        return progress

    def _next(self) -> LeaseRequest | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or self._unproven)
            return None if self._is_closing else self._unproven[0]
