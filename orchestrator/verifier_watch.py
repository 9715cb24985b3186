"""The driver's side of background verification: when the next Checkpoint is due, what came of it, and what follows.

A thread of its own, so no step, save or regroup waits for it, and the Run's end does not either. It looks at nothing
before the first Commit of this driver. Reading and judging a Checkpoint is `verifier`'s.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from orchestrator.signals import Committed, Quarantined, Signal
from orchestrator.verifier import Verdict
from orchestrator.verifier_policy import MAX_FAILURES, may_begin, verify_limit_s
from storage.config import CheckpointConfig
from storage.errors import StorageError
from storage.keys import StepKey

__all__ = ["VerifierLost", "VerifierPort", "VerifierWatch", "load_per_core"]

_log = logging.getLogger(__name__)
_LOOK_S: Final = 5.0
_CLOSE_S: Final = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 30.0, 1800.0  # after a store that failed: the whole Checkpoint is read again
_MAX_WAITING: Final = 256  # Commits remembered; the newest are verified first, the next driver finds the rest

_DOUBT: Final = (
    "the Checkpoints of steps {first} and {second} have the right digests, and neither gives what was recorded when it "
    "is loaded here: rather this machine computes something else; step {second} stays in use"
)

_ONLY: Final = "; it stays in use, as it is the only one: a resume from it takes its probe itself"

Emit = Callable[..., None]


class VerifierLost(Exception):
    """The verifier's process ended, or gave no answer in time."""


class VerifierPort(Protocol):
    """One verifier process. Every call raises VerifierLost, or the StorageError that it met."""

    def unverified(self) -> dict[StepKey, int]:
        """With their stored bytes."""
        ...

    def verify(self, key: StepKey, timeout_s: float) -> Verdict | None: ...

    def kill(self) -> None:
        """End the process now; a call that waits for it ends with VerifierLost."""
        ...


def load_per_core() -> float:
    """Of this machine, over the last minute."""
    return os.getloadavg()[0] / max(1, len(os.sched_getaffinity(0)))


class VerifierWatch:
    """One per driver. ``quarantine`` takes a Checkpoint out of use: its key, the failing object and the reason.
    ``no_load``: why Checkpoints are verified by their digests alone, None where they are loaded."""

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        spawn: Callable[[], VerifierPort],
        emit: Emit,
        quarantine: Callable[[StepKey, str, str], None],
        no_load: str | None = None,
        load: Callable[[], float] = load_per_core,
        monotonic: Callable[[], float] = time.monotonic,
        look_s: float = _LOOK_S,
    ) -> None:
        self._config, self._spawn, self._emit, self._quarantine = config, spawn, emit, quarantine
        self._no_load = no_load
        self._load, self._monotonic, self._look_s = load, monotonic, look_s
        self._lock = threading.Lock()
        self._waiting: dict[StepKey, tuple[float, int]] = {}  # since when, stored bytes
        self._port: VerifierPort | None = None
        self._num_lost = self._num_failed = 0
        self._next_at_s = -math.inf
        self._verified_to_s = -math.inf  # since when the newest that was verified had waited
        self._unproven: StepKey | None = None  # quarantined though its digests are right, and none was good since
        self._is_known = False  # what earlier drivers left unverified
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="verifier", daemon=True)

    def start(self) -> None:
        """Say how Checkpoints are verified, and begin where they are."""
        mode = "digests" if self._config.verify == "load" and self._no_load is not None else self._config.verify
        self._emit("verifying", by=mode, reason=self._no_load if mode == "digests" else None)
        if mode != "off":
            self._thread.start()

    def on_signal(self, signal: Signal) -> None:
        match signal:
            case Committed():
                key = StepKey(step=signal.step, attempt=signal.attempt)
                with self._lock:
                    self._waiting[key] = self._monotonic(), signal.stored_bytes
                    while len(self._waiting) > _MAX_WAITING:
                        del self._waiting[min(self._waiting)]
            case Quarantined():
                with self._lock:
                    for key in [key for key in self._waiting if key.step == signal.step]:
                        del self._waiting[key]
            case _:
                pass

    def close(self) -> None:
        """End it now, whatever it is reading: the next driver finds what is not verified."""
        self._closed.set()
        with self._lock:
            port, self._port = self._port, None
        if port is not None:
            port.kill()
        if self._thread.ident is not None:
            self._thread.join(timeout=_CLOSE_S)

    def _run(self) -> None:
        while not self._closed.wait(self._look_s):
            try:
                if not self.look():
                    return
            except Exception as error:  # noqa: BLE001 - the thread's outer edge: the Run goes on without
                if not self._closed.is_set():
                    _log.exception("Checkpoints are not verified any more")
                    self._emit("verify_stopped", reason=f"{type(error).__name__}: {error}")
                return

    def look(self) -> bool:
        """One round: verify the newest that waits, if it is time. False: never again in this driver."""
        if self._monotonic() < self._next_at_s:
            return True
        ages = self._ages_s()
        if not may_begin(self._config, load_per_core=self._load(), ages_s=ages):
            return True
        try:
            return self._verify_newest()
        except VerifierLost as error:
            return self._note_lost(error)
        except StorageError as error:
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self._num_failed, 16))
            self._num_failed += 1
            self._next_at_s = self._monotonic() + pause_s
            _log.info("verifying waits %g s for the store: %s", pause_s, error)
        return True

    def _ages_s(self) -> list[float]:
        """Of those that wait. Once a newer one was verified there is no haste: else a machine that is always busy, and
        commits faster than it verifies, would never have a rest."""
        now_s = self._monotonic()
        with self._lock:
            since = [since_s for since_s, _ in self._waiting.values()]
        return [now_s - since_s if since_s > self._verified_to_s else 0.0 for since_s in since]

    def _verify_newest(self) -> bool:
        port = self._ready_port()
        if not self._is_known:
            for earlier, num_bytes in port.unverified().items():
                with self._lock:
                    self._waiting.setdefault(earlier, (self._monotonic(), num_bytes))
            self._is_known = True
        with self._lock:
            if not self._waiting:  # taken out of use while the process began
                return True
            key = max(self._waiting)
            since_s, stored_bytes = self._waiting[key]
        verdict = port.verify(key, verify_limit_s(stored_bytes))
        goes_on = True if verdict is None else self._tell(verdict, self._monotonic() - since_s)
        with self._lock:
            self._waiting.pop(key, None)
        if verdict is not None and verdict.problem is None:
            self._verified_to_s = max(self._verified_to_s, since_s)
        self._num_lost = self._num_failed = 0
        return goes_on

    def _tell(self, verdict: Verdict, age_s: float) -> bool:
        key = verdict.key
        with self._lock:
            num_left = len(self._waiting.keys() - {key})
        fields: dict[str, Any] = {
            "by": verdict.by,
            "loss": verdict.loss,
            "expected": verdict.expected,
            "note": verdict.note,
            "bytes": verdict.bytes_read,
            "seconds": round(verdict.seconds, 3),
            "age_s": round(age_s, 3),
            "unverified": num_left,
        }
        if verdict.problem is None:
            self._unproven = None
            self._emit("verified", attempt=key.attempt, step=key.step, **fields)
            return True
        object_key, reason = verdict.problem
        stays = verdict.by == "load" and verdict.is_only
        reason += _ONLY if stays else ""
        self._emit("verify_failed", attempt=key.attempt, step=key.step, key=object_key, reason=reason, **fields)
        if verdict.by == "load" and self._unproven not in (None, key):  # the same again: it could not be taken out
            self._emit("verify_stopped", reason=_DOUBT.format(first=self._unproven.step, second=key.step))
            return False
        self._unproven = key if verdict.by == "load" else self._unproven
        if not stays:
            self._quarantine(key, object_key, f"verified in the background: {reason}")
        return True

    def _ready_port(self) -> VerifierPort:
        with self._lock:
            port = self._port
        if port is None:
            port = self._spawn()
            with self._lock:
                self._port = port
            if self._closed.is_set():  # it was closed while the process began
                port.kill()
                raise VerifierLost("the run has ended")
        return port

    def _note_lost(self, error: VerifierLost) -> bool:
        with self._lock:
            port, self._port = self._port, None
        if port is not None:
            port.kill()
        if self._closed.is_set():
            return False
        self._num_lost += 1
        if self._num_lost < MAX_FAILURES:
            _log.info("the verifier is started anew: %s", error)
            return True
        self._emit("verify_stopped", reason=f"the verifier was lost {self._num_lost} times in a row; last: {error}")
        return False
