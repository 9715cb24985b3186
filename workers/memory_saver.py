"""The memory Tier as a rank's training thread meets it: takes generations and knows which of them are whole everywhere.

Buffers, random state and plain state are captured at the end of the step; parameters and the optimizer's state are
copied beside the next forward and backward, and the optimizer's next step waits for that copy. It makes no call of a
Keeper: its side threads do (`generation_writer`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any, Final, cast

from storage.keeper_protocol import MemoryPort
from workers.contract import AttemptSpec, MemorySpec
from workers.evaluation import reshard
from workers.generation_writer import GenerationWriter
from workers.local_step import looks_at_no_tensor
from workers.memory_cadence import MemoryCadence
from workers.memory_ticket import Ticket
from workers.proof import ProofRecord, attach
from workers.settings import WorkerSettings
from workers.snapshot import capture
from workers.staging import Stager
from workers.state import TrainingState
from workers.step_vector import StepTotals

__all__ = ["MemorySaver"]

_log = logging.getLogger(__name__)
_FIRST_S: Final = 2.0  # the first generation of an Attempt may wait so long for a buffer: there is none before it
_GRACE_S: Final = 0.05  # for the Keeper's answer, where a step is over so soon that there is none yet
_CLOSE_S: Final = 5.0


class MemorySaver:
    """One Attempt's. All of it belongs to the training thread, but for what its side threads do."""

    def __init__(
        self,
        state: TrainingState,
        memory: MemorySpec,
        *,
        settings: WorkerSettings,
        spec: AttemptSpec,
        stager: Stager,
        check: Callable[[], None],
        grace_s: float = _GRACE_S,
    ) -> None:
        self._state, self._spec, self._stager, self._check = state, spec, stager, check
        self._grace_s = grace_s
        self._first_step = state.progress.step + 1
        self._cadence = MemoryCadence(
            settings.checkpoint.memory,
            base_step=state.progress.step,
            total_steps=settings.total_steps,
            world_size=spec.world.size,
        )
        self._writer = GenerationWriter(
            stager,
            cast(MemoryPort, stager.keeper),  # a driver that sets spec.memory has made Keepers with a memory Tier
            peer=memory.peer,
            world_size=spec.world.size,
            name=f"attempt {spec.attempt.label} rank {spec.rank}",
        )
        self._open: Ticket | None = None  # its copy is not known to be made
        self._to_ship: list[Ticket] = []
        self._stall_s = 0.0
        self._hook = state.optimizer.register_step_pre_hook(self._before_update)
        self._writer.start()

    @property
    def safe_step(self) -> int:
        return self._cadence.safe_step

    @property
    def newest_step(self) -> int:
        return self._cadence.newest_step

    @property
    def stall_s(self) -> float:
        """How long training stood still for the newest Snapshot whose copy is made."""
        return self._stall_s

    @property
    def num_left_out(self) -> int:
        return self._writer.num_left_out

    def bind(self, step: int, step_s: float) -> int:
        """Rank 0: what goes into the vector of ``step``."""
        return self._cadence.bind(step, step_s)

    def replicated(self, step: int) -> tuple[bool, ...]:
        """What this rank's vector of ``step`` says of its generations: which have their replicas."""
        return tuple(self._writer.is_replicated(told) for told in self._cadence.told(step))

    def left_out(self, step: int) -> tuple[bool, ...]:
        """And which of them it does not have."""
        return tuple(self._writer.is_left_out(told) for told in self._cadence.told(step))

    def learn(self, step: int, totals: StepTotals) -> None:
        self._cadence.learn(step, totals.memory_step, totals.num_replicated, totals.num_left_out)
        self._writer.note_safe(self._cadence.safe_step, self._cadence.given_up)

    def reach(self, step: int, *, is_ordered: bool) -> bool:
        return self._cadence.reach(step, is_ordered=is_ordered)

    def take(
        self, step: int, *, ship: bool, wait_s: float | None, bounded: bool = False, proof: ProofRecord | None = None
    ) -> bool:
        """Take a Snapshot of ``step``; ``ship``: for the store as well, ``bounded``: there in the cheaper form.
        ``wait_s`` None: nothing is waited for, and what became of it shows later. False: it was not taken in that
        time."""
        started_at = time.monotonic()
        self.settle()
        reshard(self._state.model)  # a loop's own evaluation may have left parameters whole
        spec = self._spec
        snapshot = capture(self._state, rank=spec.rank, world_size=spec.world.size)
        attach(snapshot, proof)
        make = self._stager.draft if wait_s is not None else self._stager.draft_apart
        draft = make(snapshot, attempt=spec.attempt, step=step, rank=spec.rank, world_size=spec.world.size)
        until = math.inf if wait_s is None else started_at + wait_s
        probe_s = 0.0 if proof is None else proof.seconds
        ticket = Ticket(draft, self._stager.request(draft), ship=ship, until=until, bounded=bounded, stalled_s=probe_s)
        del draft, snapshot
        ticket.add_stall(time.monotonic() - started_at)
        self._writer.submit(ticket, self._check)
        if wait_s is not None:
            return ticket.wait_sealed(self._check)
        self._open = ticket
        if ship:
            self._to_ship.append(ticket)
        return True

    def take_left_out(self) -> tuple[int, ...]:
        """Steps that were to be carried to the store and have not been sealed. Raises what their Keeper refused."""
        over = [ticket for ticket in self._to_ship if ticket.is_over_within(0)]
        self._to_ship = [ticket for ticket in self._to_ship if ticket not in over]
        return tuple(ticket.step for ticket in over if not ticket.result())

    def close(self) -> None:
        """Let go of the state. What is sealed stays with the Keeper."""
        self._hook.remove()
        if not self._writer.close(_CLOSE_S):
            _log.warning("rank %d: a copy into memory did not end within %g s", self._spec.rank, _CLOSE_S)
        self._open = None
        self._to_ship.clear()

    def settle(self) -> None:
        """Return when everything that is to be kept is copied, or taken back: tensors may change from here on."""
        ticket, self._open = self._open, None
        if ticket is None:
            return
        is_first = ticket.step == self._first_step
        if ticket.take_back(_FIRST_S if is_first else self._grace_s):
            return
        ticket.wait_copied(self._check)
        self._stall_s = ticket.stall_s
        if not is_first:
            self._cadence.note_stall(ticket.stall_s)

    @looks_at_no_tensor
    def _before_update(self, *_: Any) -> None:
        """The optimizer's hook: nothing may change before it is copied."""
        self.settle()
