"""Checkpoints of a training loop that has neither driver nor Keeper: found, restored and saved by its own ranks.

The same TrainingState, names and store layout as those of a Run under a driver. A save is copied before `save` returns
and written by a thread; at most one is under way. When to save is the caller's matter.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from pydantic import JsonValue
from torch.distributed.checkpoint.state_dict_saver import save

from storage.config import CheckpointConfig
from storage.dcp_lineage import lineage_of
from storage.dcp_standalone import RaysumeWriter, own_errors
from storage.errors import CorruptCheckpoint, StorageError
from storage.events import utc_text
from storage.keys import Attempt, new_nonce
from storage.manifest import Manifest
from storage.restore import plan_restore, read_manifest
from storage.sources import RestorePlan
from workers.replica_digest import digests, names_of
from workers.resume import RestoreReport, restore
from workers.save_trigger import SaveOver
from workers.snapshot import Capture, capture
from workers.state import TrainingState
from workers.unison import Ranks

__all__ = ["Found", "LoopCheckpoints"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The Checkpoint that all ranks go on from."""

    plan: RestorePlan
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.plan.step


@dataclass(slots=True, kw_only=True)
class _UnderWay:
    step: int
    writer: RaysumeWriter
    began_at_s: float
    stall_s: float
    raw_bytes: int
    ended: threading.Event = field(default_factory=threading.Event)
    ended_at_s: float = 0.0
    failure: str | None = None


class LoopCheckpoints:
    """Made on every rank with the same arguments. Methods that say so are collective."""

    def __init__(self, url: str, ranks: Ranks, *, keep: int | None, config: CheckpointConfig) -> None:
        self._url, self._ranks, self._keep, self._config = url, ranks, keep, config
        self._base_step = 0
        self._under_way: _UnderWay | None = None
        if ranks.size == 1:
            # A single process is what is meant, not an accident to warn about.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    def newest(self) -> Found | None:
        """Collective: the newest usable Checkpoint, the same for all ranks; None: the Run has none."""
        return self._ranks.from_first(self._find)

    def _find(self) -> Found | None:
        log = lineage_of(self._url, self._config.store).log
        # Nobody journals this plan: the Attempt in it is that of no one.
        plan = plan_restore(log, attempt=Attempt(number=0, nonce=new_nonce()))
        return None if plan is None else Found(plan=plan, manifest=read_manifest(plan, log.store))

    def restore(self, state: TrainingState, found: Found, *, seed: int) -> RestoreReport:
        """Collective: fill ``state``. Raises CorruptCheckpoint on all ranks, after `found` was taken out of use, so
        that the next `newest` finds the one before it; any other error with the rank that had it."""
        ranks = self._ranks
        store = lineage_of(self._url, self._config.store).store
        report: RestoreReport | None = None
        failure: Exception | None = None
        try:
            report = restore(state, found.plan, store, rank=ranks.rank, world_size=ranks.size, seed=seed)
        except Exception as error:  # noqa: BLE001  every rank must hear of it before any leaves
            failure = error
        failures = ranks.gathered(failure)
        corrupt = next((one for one in failures if isinstance(one, CorruptCheckpoint)), None)
        if corrupt is not None:
            ranks.from_first(lambda: self._quarantine(found, corrupt))
            raise corrupt
        for rank, one in enumerate(failures):
            if one is not None:
                one.add_note(f"on rank {rank}, while step {found.step} was restored")
                raise one
        assert report is not None
        self._base_step = found.step
        return report

    def _quarantine(self, found: Found, error: CorruptCheckpoint) -> None:
        log = lineage_of(self._url, self._config.store).log
        log.quarantine(found.plan.source, error.key, error.reason, utc_text(time.time()))
        logger.warning("step %d is quarantined: %s; the one before it is loaded", found.step, error)

    # -- saving -----------------------------------------------------------------------------------------------------

    @property
    def step_under_way(self) -> int | None:
        """The save that has not been settled yet."""
        return None if self._under_way is None else self._under_way.step

    def save(
        self,
        state: TrainingState,
        *,
        loss: float | None = None,
        metric: float | None = None,
        metadata: Mapping[str, JsonValue] | None = None,
    ) -> None:
        """Collective: copy ``state`` and have it stored. Returns after the copy. The one before must be settled."""
        if self._under_way is not None:
            raise StorageError(
                f"rank {self._ranks.rank}: step {self._under_way.step} is still being saved; settle it before "
                f"step {state.progress.step}"
            )
        began_at_s = time.monotonic()
        captured = capture(state, rank=self._ranks.rank, world_size=self._ranks.size)
        writer = RaysumeWriter(
            self._url,
            step=state.progress.step,
            keep=self._keep,
            base_step=self._base_step,
            loss=loss,
            metric=metric,
            metadata=metadata,
            shared_state=captured.shared_state,
            rank_state={**captured.rank_state, **self._replica_digests(captured)},
            config=self._config,
        )
        staged = writer.stage(captured.tensors)
        assert isinstance(staged, dict)
        self._under_way = _UnderWay(
            step=state.progress.step,
            writer=writer,
            began_at_s=began_at_s,
            stall_s=time.monotonic() - began_at_s,
            raw_bytes=_size(captured.tensors),
        )
        # Not DCP's own async_save: it looks through the state and says so of each tensor before it returns.
        threading.Thread(target=self._store, args=(staged, self._under_way), name="raysume-save").start()

    def _store(self, staged: dict[str, torch.Tensor], under_way: _UnderWay) -> None:
        try:
            with own_errors("save"):
                save(staged, storage_writer=under_way.writer, process_group=self._ranks.saves)
        except Exception as error:  # noqa: BLE001  a save that failed is a fact; what follows from it is the caller's
            under_way.failure = f"{type(error).__name__}: {error}"
        finally:
            under_way.ended_at_s = time.monotonic()
            under_way.ended.set()

    def _replica_digests(self, captured: Capture) -> dict[str, JsonValue]:
        """For the coordinator rank, which commits nothing where ranks that should hold the same do not."""
        own = digests(captured.replicas) if captured.replicas else {}
        return {**own, **names_of(captured.replicas)} if captured.replicas and self._ranks.rank == 0 else own

    @property
    def is_over(self) -> bool:
        """Whether the save under way has ended on this rank, so that `settle` will not wait."""
        return self._under_way is not None and self._under_way.ended.is_set()

    def settle(self, timeout_s: float) -> SaveOver | None:
        """How the save under way ended, after at most ``timeout_s``; None: there is none. A failed one is no
        exception. Raises StorageError where it does not end."""
        under_way = self._under_way
        if under_way is None:
            return None
        if not under_way.ended.wait(timeout_s):
            raise StorageError(
                f"rank {self._ranks.rank}: the save of step {under_way.step} to {self._url} did not end within "
                f"{timeout_s:g} s; see whether the store answers, or raise checkpoint.final_timeout_s"
            )
        self._under_way = None
        commit = under_way.writer.commit
        return SaveOver(
            step=under_way.step,
            stall_s=under_way.stall_s,
            write_s=under_way.ended_at_s - under_way.began_at_s - under_way.stall_s,
            raw_bytes=under_way.raw_bytes,
            stored_bytes=0 if commit is None else commit.stored_bytes,
            failure=under_way.failure,
        )


def _size(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
