"""One warm worker process: stays across Attempts, runs one training thread at a time, answers for it.

A plain class; `workers.worker` makes it an actor. It refuses Attempts that are not newer than those it has seen, and
never starts a second thread beside a living one.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable

import torch

from storage.keeper_protocol import KeeperPort
from storage.keys import Attempt
from storage.levels import LevelTable
from workers.contract import AbandonReport, AttemptSpec, CoordinatorPort, Heartbeat, Outcome, Phase, WorkerFacts
from workers.dataset_mix import open_rows
from workers.errors import AttemptRefused
from workers.heartbeat import Pulse
from workers.loading import WarmParts
from workers.models import ModelTemplate, state_bytes
from workers.session import Session
from workers.settings import WorkerSettings
from workers.staging import Stager
from workers.train_loop import train
from workers.training_thread import TrainingThread

__all__ = ["WorkerProcess"]

_ENDING_S = 10.0


class WorkerProcess:
    """Call order: `prepare` once; then for each Attempt `start`, `wait_outcome`, and `abandon` if it must end early."""

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        worker_id: str,
        node_id: str,
        keeper: KeeperPort,
        train_loop: Callable[[Session], None] | None = None,
    ) -> None:
        self._settings, self._worker_id, self._node_id = settings, worker_id, node_id
        self._train_loop = train if train_loop is None else train_loop
        self._stager = Stager(
            keeper,
            settings.run_id,
            os.getpid(),
            LevelTable.of(settings.checkpoint),
            compares_replicas=settings.model.compare_replicas,
        )
        self._pulse = Pulse()
        self._changed = threading.Condition()
        self._parts: WarmParts | None = None
        self._thread: TrainingThread | None = None
        self._refused: AttemptRefused | None = None
        self._abandoned_number = -1

    def prepare(self) -> WorkerFacts:
        """Do what is slow and the same for every Attempt: build the model template, open the data."""
        settings = self._settings
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        device = _pick_device()
        store = settings.checkpoint.store
        dataset = open_rows(settings.data, "train", store)
        validation = None
        if settings.eval.every_steps is not None:
            validation = open_rows(settings.data, "validation", store)
        template = ModelTemplate.build(settings.model) if settings.model.config else None
        parts = WarmParts(device=device, template=template, dataset=dataset, validation=validation, stager=self._stager)
        gc.collect()
        gc.freeze()  # what the imports made lives as long as the process: a regroup's collection need not walk it
        with self._changed:
            self._parts = parts
        self._pulse.beat(Phase.IDLE)
        return WorkerFacts(
            worker_id=self._worker_id,
            node_id=self._node_id,
            pid=os.getpid(),
            host=socket.gethostname(),
            device=str(device),
            state_bytes=None if template is None else state_bytes(template.model),
        )

    def start(self, spec: AttemptSpec, coordinator: CoordinatorPort) -> None:
        """Begin an Attempt in a thread of its own. Raises AttemptRefused, and then changes nothing."""
        with self._changed:
            try:
                parts = self._check_start(spec)
            except AttemptRefused as error:
                self._refused = error
                self._changed.notify_all()
                raise
            self._stager.resume()
            self._thread = TrainingThread(
                self._settings,
                spec,
                parts,
                worker_id=self._worker_id,
                train_loop=self._train_loop,
                coordinator=coordinator,
                pulse=self._pulse,
            )
            self._pulse.beat(Phase.FORMING, step=0 if spec.restore is None else spec.restore.step)
            self._thread.start()
            self._changed.notify_all()

    def wait_outcome(self, attempt: Attempt, timeout_s: float) -> Outcome | None:
        """How ``attempt`` ended here; None when it goes on. Waits for a `start` that is still on its way.

        Raises AttemptRefused when this worker refused to start it, or works for a newer one.
        """
        until = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: self._is_decided(attempt), timeout_s)
            thread, refused = self._thread, self._refused
        if thread is not None and thread.attempt == attempt:
            return thread.wait_outcome(max(0.0, until - time.monotonic()))
        if refused is not None and refused.attempt == attempt.label:
            raise AttemptRefused(*refused.args)
        if thread is not None and thread.attempt.number >= attempt.number:
            raise AttemptRefused(self._worker_id, attempt.label, f"this worker works for {thread.attempt.label}")
        return None

    def heartbeat(self) -> Heartbeat:
        """What the training thread does now. Answers at once, whatever that thread is stuck in."""
        reading = self._pulse.read()
        with self._changed:
            attempt = None if self._thread is None else self._thread.attempt
        return Heartbeat(
            worker_id=self._worker_id,
            attempt=attempt,
            phase=reading.phase,
            step=reading.step,
            age_s=reading.age_s,
            restored=reading.restored,
            spent_s=reading.spent_s,
        )

    def abandon(self, attempt: Attempt, timeout_s: float) -> AbandonReport:
        """End ``attempt`` and let go of its model. Not clean: the process must be ended before a new Attempt.

        An Attempt that this worker never started is clean already, and is not started after that.
        """
        with self._changed:
            self._abandoned_number = max(self._abandoned_number, attempt.number)
            is_ours = self._thread is not None and self._thread.attempt == attempt
            thread = self._thread if is_ours else None
        is_clean = True if thread is None else thread.abandon(timeout_s)
        return AbandonReport(
            attempt=attempt,
            worker_id=self._worker_id,
            is_clean=is_clean,
            last_step=0 if thread is None else thread.last_step,
        )

    def close(self) -> None:
        """End the current Attempt, if any, and drop the mapped buffers."""
        with self._changed:
            thread = self._thread
        if thread is not None:
            thread.abandon(_ENDING_S)
        self._stager.close()

    def _is_decided(self, attempt: Attempt) -> bool:
        is_started = self._thread is not None and self._thread.attempt.number >= attempt.number
        return is_started or (self._refused is not None and self._refused.attempt == attempt.label)

    def _check_start(self, spec: AttemptSpec) -> WarmParts:
        label, old = spec.attempt.label, self._thread
        if self._parts is None:
            raise AttemptRefused(self._worker_id, label, "prepare() has not been called")
        if spec.world.members[spec.rank].worker_id != self._worker_id:
            raise AttemptRefused(self._worker_id, label, f"rank {spec.rank} of its World is another worker")
        if spec.attempt.number <= self._abandoned_number:
            raise AttemptRefused(self._worker_id, label, f"attempt number {self._abandoned_number} was abandoned")
        if old is None:
            return self._parts
        if spec.attempt.number <= old.attempt.number:
            raise AttemptRefused(self._worker_id, label, f"it is not newer than {old.attempt.label}")
        if old.wait_outcome(0) is not None:
            old.join(_ENDING_S)
        if old.is_alive:
            raise AttemptRefused(
                self._worker_id, label, f"the training thread of {old.attempt.label} is still alive; abandon it first"
            )
        return self._parts


def _pick_device() -> torch.device:
    """The one accelerator that Ray gave this process, else the CPU."""
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)
    return torch.device("cpu")
