"""The one thread of the coordinator's slow work: merging, writing, sweeping, and the choice of where to go on.

In the order in which it was asked for, so a plan is chosen behind every Commit under way and never beside a deletion.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from orchestrator.committer import Committer
from orchestrator.patient_store import PatientStore
from storage.errors import StoreUnavailable
from storage.keys import Attempt, StepKey
from storage.sources import RestorePlan

__all__ = ["CommitterThread"]

_PLAN_S = 540.0  # reading the commit log and one Manifest, retries of the store included
_LOOK_S = 0.5  # how often a call that waits behind a Commit looks whether the store is away


class CommitterThread:
    """``store``: the one that ``committer`` writes to."""

    def __init__(self, committer: Committer, store: PatientStore, monotonic: Callable[[], float]) -> None:
        self._committer, self._store, self._monotonic = committer, store, monotonic
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="committer")

    def submit(self, work: Callable[..., None], *arguments: Any) -> None:
        """Have ``work``, which must not raise, done in its turn."""
        self._executor.submit(work, *arguments)

    def choose_plan(
        self, attempt: Attempt, step: int | None, allow_partial: bool, url: str | None
    ) -> tuple[RestorePlan | None, list[tuple[StepKey, str, str]]]:
        """See `Committer.choose_plan`. Raises StoreUnavailable while a Commit before it waits for the store."""
        chosen = self._executor.submit(self._committer.choose_plan, attempt, step, allow_partial, url)
        self._await_turn(chosen)
        return chosen.result(timeout=_LOOK_S)

    def close(self, timeout_s: float) -> None:
        """Finish what was asked for, but wait for no store."""
        self._store.close()
        self._executor.submit(lambda: None).result(timeout=timeout_s)
        self._executor.shutdown(wait=False)

    def _await_turn(self, chosen: Future[Any]) -> None:
        deadline = self._monotonic() + _PLAN_S
        while not wait([chosen], timeout=_LOOK_S).done:
            reason = self._store.trouble
            if reason is None and self._monotonic() >= deadline:
                reason = f"no answer within {_PLAN_S:g} s"
            if reason is not None and chosen.cancel():
                raise StoreUnavailable("choose a restore plan from", "commits/", f"waiting behind a Commit: {reason}")
