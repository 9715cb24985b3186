"""What this process knows of a Run that it saves to without a driver: its Attempt, its base step, its saves under way.

One object per store and process. Only the process that coordinates a save asks for an Attempt; nothing here is sent to
other ranks.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field

from storage.codec import digest64
from storage.commit_log import CommitLog
from storage.config import StoreConfig
from storage.errors import CommitRefused
from storage.keys import COMMITS, JOURNAL, SHARDS, Attempt, StepKey, new_nonce, parse_shard_key, parse_step_key
from storage.object_store import ObjectStore
from storage.open_store import open_store

__all__ = ["Lineage", "SaveTicket", "SaveUnderWay", "lineage_of"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTicket:
    """What the coordinator hands each rank of one save."""

    run_id: str
    attempt: Attempt
    step: int
    base_step: int
    rank: int
    world_size: int

    @property
    def key(self) -> StepKey:
        return StepKey(step=self.step, attempt=self.attempt)


@dataclass(slots=True, kw_only=True)
class SaveUnderWay:
    """An async save of this process. It ends with its ``thread``, which lives for this one save alone.

    The Commit is no sign of the end: the ranks still tell each other of it, on the group that a load would use next.
    """

    step: int
    started: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def wait(self, timeout_s: float) -> bool:
        """False when it has not ended within ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        if not self.started.wait(timeout_s) or self.thread is None:
            return False
        self.thread.join(max(0.0, deadline_s - time.monotonic()))
        return not self.thread.is_alive()


class Lineage:
    """One process's part in one Run."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.log = CommitLog(store, None)
        self._lock = threading.Lock()
        self._attempt: Attempt | None = None
        self._attempts: set[Attempt] = set()
        self._base_step = 0
        self._run_id = ""
        self._last_step = -1
        self._loaded: set[int] = set()
        self._under_way: list[SaveUnderWay] = []
        self.orphans_seen_at_s: dict[StepKey, float] = {}

    def ticket(self, step: int, *, base_step: int | None) -> SaveTicket:
        """The identity of the save of ``step``, for rank 0 of a world of one. Raises CommitRefused.

        A new Attempt begins with the first save of this process, and when it saves a step again: it went back then.
        """
        with self._lock:
            if self._attempt is None or step <= self._last_step or base_step not in (None, self._base_step):
                self._begin_attempt(step, base_step)
            assert self._attempt is not None
            self._refuse_if_fenced(step, self._attempt)
            self._last_step = step
            return SaveTicket(
                run_id=self._run_id,
                attempt=self._attempt,
                step=step,
                base_step=self._base_step,
                rank=0,
                world_size=1,
            )

    def _begin_attempt(self, step: int, base_step: int | None) -> None:
        if self.store.list(JOURNAL):
            raise CommitRefused(
                f"step {step} is not saved: {self.store.url} belongs to a Run with a driver, which alone commits "
                "there; save under another url"
            )
        scan = self.log.scan()
        history = self.log.commits()
        shards = (parse_shard_key(entry.key) for entry in self.store.list(SHARDS))
        numbers = [commit.attempt.number for commit in scan.commits]
        numbers += [parsed[0].attempt.number for parsed in shards if parsed is not None]
        if base_step is None:
            earlier = [commit for commit in history if commit.step < step]
            # The latest that this process has loaded or committed: a base too early would void good Checkpoints.
            known = {loaded for loaded in self._loaded if loaded < step}
            known |= {commit.step for commit in earlier if commit.step_key.attempt in self._attempts}
            base_step = max(known or {commit.step for commit in earlier}, default=0)
        void = [str(commit.step) for commit in history if commit.step > base_step]
        self._attempt = Attempt(number=max(numbers, default=0) + 1, nonce=new_nonce())
        self._attempts.add(self._attempt)
        self._base_step = base_step
        self._run_id = scan.commits[-1].run_id if scan.commits else f"dcp-{digest64(self.store.url.encode())[:8]}"
        if void:
            logger.warning(
                "%s: attempt %s goes on from step %d: its first commit makes the older ones of step %s void",
                self.store.url,
                self._attempt.label,
                base_step,
                ", ".join(void),
            )

    def _refuse_if_fenced(self, step: int, attempt: Attempt) -> None:
        """Before any data is written; the Commit itself is fenced again."""
        for entry in self.store.list(COMMITS):
            other = parse_step_key(entry.key)
            if other is not None and other.attempt != attempt and other.attempt.number >= attempt.number:
                raise CommitRefused(
                    f"step {step} of attempt {attempt.label} is not saved: attempt {other.attempt.label} has committed "
                    f"step {other.step}; another process saves this run, stop this one"
                )

    def note_loaded(self, step: int) -> None:
        """This process goes on from ``step``, unless it loads a later one too."""
        with self._lock:
            self._loaded.add(step)

    def begin(self, step: int) -> None:
        """An async save was asked for; its thread comes later."""
        with self._lock:
            running = [save for save in self._under_way if save.thread is None or save.thread.is_alive()]
            self._under_way = [*running, SaveUnderWay(step=step)]

    def start(self, step: int) -> None:
        """This thread does the save of ``step``, if that is one that `begin` was told of."""
        with self._lock:
            for save in self._under_way:
                if save.step == step and not save.started.is_set():
                    save.thread = threading.current_thread()
                    save.started.set()
                    return

    def forget(self, step: int) -> None:
        """The save of ``step`` comes to nothing, or goes on in another process."""
        with self._lock:
            self._under_way = [save for save in self._under_way if save.step != step]

    def wait_for_saves(self, timeout_s: float) -> None:
        """Return when no async save of this process is under way, or with a warning after ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            waiting = [save for save in self._under_way if save.thread is not threading.current_thread()]
        for save in waiting:
            if not save.wait(max(0.0, deadline_s - time.monotonic())):
                logger.warning("the save of step %d did not end within %g s; not waited for", save.step, timeout_s)
        with self._lock:
            self._under_way = [save for save in self._under_way if save not in waiting]


_lineages: dict[tuple[int, str, str | None], Lineage] = {}
_lineages_lock = threading.Lock()


def lineage_of(url: str, config: StoreConfig) -> Lineage:
    """The one Lineage of this process for ``url``."""
    key = (os.getpid(), url.rstrip("/"), config.endpoint_url)
    with _lineages_lock:
        if key not in _lineages:
            _lineages[key] = Lineage(open_store(url, config))
        return _lineages[key]
