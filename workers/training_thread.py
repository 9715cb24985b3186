"""The one thread of a worker that trains: forms the groups, runs the loop, and ends in exactly one Outcome.

Whatever is raised in it becomes a plain value. Its groups are closed first, so that the other ranks' waiting calls fail
at once and not at their time-out; then everything that holds the model is dropped. Retrying is not its business.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from storage.keys import Attempt
from workers.chaos_seam import ChaosError
from workers.contract import AttemptSpec, CauseKind, CoordinatorPort, FailureCause, Outcome, OutcomeKind, Phase
from workers.courier import Courier
from workers.errors import AttemptAbandoned, LoopMisused
from workers.failure_cause import cause_of
from workers.groups import Groups
from workers.heartbeat import Pulse
from workers.loading import WarmParts
from workers.session import Session
from workers.settings import WorkerSettings
from workers.weights_digest import weights_digest

__all__ = ["TrainingThread"]

_log = logging.getLogger(__name__)
_FLUSH_S = 30.0
_FLUSH_FAILED_S = 1.0
_COURIER_CLOSE_S = 5.0
_PATIENCE_S = 0.25  # within which a collective ends by its groups' close, unless a member has vanished


def _have_ended(threads: list[threading.Thread], timeout_s: float) -> bool:
    until = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


class TrainingThread:
    """One Attempt of one worker, from `start` to its Outcome."""

    def __init__(
        self,
        settings: WorkerSettings,
        spec: AttemptSpec,
        parts: WarmParts,
        *,
        worker_id: str,
        train_loop: Callable[[Session], None],
        coordinator: CoordinatorPort,
        pulse: Pulse,
    ) -> None:
        self._settings, self._spec, self._parts = settings, spec, parts
        self._worker_id, self._train_loop, self._pulse = worker_id, train_loop, pulse
        self._groups = Groups(spec, parts.device, settings.model.shard_size)
        self._courier = Courier(coordinator, spec.attempt) if spec.rank == 0 else None
        self._is_abandoned = threading.Event()
        self._is_over = threading.Event()
        self._has_formed = False
        self._outcome: Outcome | None = None
        self._last_step = 0
        self._model: weakref.ref[nn.Module] | None = None
        # Never one that trained before: torch's caches of sharded tensors' operations are a thread's own, and what they
        # give holds the mesh, and by that the rank, of the time when they were filled.
        name = f"train-{spec.attempt.label}-rank-{spec.rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def attempt(self) -> Attempt:
        return self._spec.attempt

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def last_step(self) -> int:
        return self._last_step

    def start(self) -> None:
        self._thread.start()

    def wait_outcome(self, timeout_s: float) -> Outcome | None:
        """The Outcome, or None when there is none yet."""
        return self._outcome if self._is_over.wait(timeout_s) else None

    def join(self, timeout_s: float) -> None:
        """Wait for the end of a thread whose Outcome is there already."""
        self._thread.join(timeout_s)

    def abandon(self, timeout_s: float) -> bool:
        """End the thread: it stops at its next check, or when the collective it waits in fails. True when it has ended
        and its model is released. A thread that neither checks nor waits in a collective can only be ended with its
        process."""
        self._is_abandoned.set()
        self._parts.stager.cancel()
        # On a thread of its own: gloo closes a group when its calls have ended, and one that waits for a machine that
        # has vanished does not.
        closing = threading.Thread(target=self._groups.close, name=f"close-{self.attempt.label}", daemon=True)
        closing.start()
        threads = [closing] if self._thread.ident is None else [closing, self._thread]
        if not _have_ended(threads, min(_PATIENCE_S, timeout_s)):
            self._groups.cut()
            if not _have_ended(threads, timeout_s):
                return False
        if self._model is None or self._model() is None:
            return True  # the thread has collected: once more would keep all who regroup waiting for nothing
        gc.collect()
        return self._model() is None

    def _check(self) -> None:
        if self._is_abandoned.is_set():
            raise AttemptAbandoned(self.attempt.label, "it was abandoned")

    def _run(self) -> None:
        session = Session(
            self._settings,
            self._spec,
            self._parts,
            groups=self._groups,
            courier=self._courier,
            pulse=self._pulse,
            check=self._check,
        )
        cause: FailureCause | None = None
        digest: str | None = None
        try:
            digest = self._train(session)
        except BaseException as error:  # noqa: BLE001  the thread's outermost edge: nothing passes it but as a value
            self._groups.close()
            cause = self._cause(error, session.finished_step)
        is_leaving, self._last_step, self._model = session.is_leaving, session.finished_step, session.model_reference
        session.release()
        self._groups.close()
        del session
        gc.collect()  # the last references to the groups go with the model, and with them the neighbours' connections
        self._end(cause, digest, is_leaving=is_leaving)

    def _train(self, session: Session) -> str | None:
        """The digest of the final weights, on rank 0 and where the last step was reached."""
        self._pulse.beat(Phase.FORMING)
        self._groups.form(self._check)
        self._has_formed = True
        if self._courier is not None:
            self._courier.start()
        self._train_loop(session)
        session.drain()
        if not session.is_leaving and session.finished_step < self._settings.total_steps:
            raise LoopMisused(
                f"the train loop returned after step {session.finished_step} of {self._settings.total_steps};"
                " it must go on until session.steps() ends"
            )
        digest = None if session.is_leaving else weights_digest(session.state.model, rank=self._spec.rank)
        self._groups.barrier()
        return digest

    def _cause(self, error: BaseException, finished_step: int) -> FailureCause:
        restore = self._spec.restore
        is_restoring = restore is not None and self._pulse.read().phase in (Phase.FORMING, Phase.LOADING)
        cause = cause_of(
            error,
            rank=self._spec.rank,
            step=restore.step if restore is not None and is_restoring else finished_step + 1,
            loaded=None if restore is None else restore.source,
            is_abandoned=self._is_abandoned.is_set(),
        )
        is_forming = not self._has_formed
        if is_forming and cause.kind is CauseKind.USER and not isinstance(error, ChaosError):
            # No code of the loop has run yet. What chaos raises stands for such code wherever it strikes.
            cause = replace(cause, kind=CauseKind.COLLECTIVE)
        cause = replace(cause, is_restoring=is_restoring, is_forming=is_forming)
        # What others' trouble looks like from here is not worth a line on the driver's terminal.
        is_echo = cause.kind in (CauseKind.ABANDONED, CauseKind.COLLECTIVE)
        level = logging.INFO if is_echo else logging.ERROR
        _log.log(level, "%s: %s: %s: %s", cause.where, cause.kind, cause.error_type, cause.message)
        return cause

    def _close_courier(self, *, is_failed: bool) -> None:
        if self._courier is None:
            return
        flush_s = _FLUSH_FAILED_S if is_failed else _FLUSH_S
        if not self._courier.flush(flush_s):
            _log.warning("attempt %s: the last reports were not delivered in %g s", self.attempt.label, flush_s)
        self._courier.close(_COURIER_CLOSE_S)

    def _end(self, cause: FailureCause | None, digest: str | None, *, is_leaving: bool) -> None:
        self._close_courier(is_failed=cause is not None)
        kind = OutcomeKind.LEFT if is_leaving else OutcomeKind.FINISHED
        self._outcome = Outcome(
            attempt=self.attempt,
            worker_id=self._worker_id,
            rank=self._spec.rank,
            kind=kind if cause is None else OutcomeKind.FAILED,
            last_step=self._last_step,
            cause=cause,
            weights_digest=digest,
        )
        self._pulse.beat(Phase.IDLE)
        self._is_over.set()
