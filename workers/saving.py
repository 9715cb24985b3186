"""What a rank's Session does to save: carries out what is due at the end of a step, for the store and for memory.

When something is due is the order desk's and the memory cadence's to say. A step that is both is copied once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from storage.errors import KeeperUnreachable
from workers.contract import AttemptSpec, BoundOrder, OrderKind, Phase
from workers.evaluation import reshard
from workers.heartbeat import Pulse
from workers.memory_saver import MemorySaver
from workers.order_desk import OrderDesk
from workers.proof import Proof, ProofRecord, attach
from workers.save_share import ShareMeter
from workers.settings import WorkerSettings
from workers.snapshot import capture
from workers.staging import Stager
from workers.state import TrainingState
from workers.step_vector import StepTotals

__all__ = ["Saving"]

_log = logging.getLogger(__name__)
_KEEPER_AWAY_S = 0.5  # between two tries to reach a Keeper whose successor is on its way
_PART_S = 5.0  # longest wait for a buffer of a World that is about to regroup


class Saving:
    """One Attempt's, made together with the state. All of it belongs to the training thread."""

    def __init__(
        self,
        state: TrainingState,
        *,
        settings: WorkerSettings,
        spec: AttemptSpec,
        stager: Stager,
        desk: OrderDesk,
        pulse: Pulse,
        check: Callable[[], None],
        share: ShareMeter,
        proof: Proof | None = None,
    ) -> None:
        self._share, self._proof = share, proof
        self._state, self._settings, self._spec, self._stager = state, settings, spec, stager
        self._desk, self._pulse, self._check = desk, pulse, check
        self._order: BoundOrder | None = None
        self._is_in_memory = False
        self.is_leaving = False
        """Whether an Order that ends the Attempt has been carried out."""
        self.memory: MemorySaver | None = None
        if spec.memory is not None:
            self.memory = MemorySaver(state, spec.memory, settings=settings, spec=spec, stager=stager, check=check)

    def learn(self, step: int, totals: StepTotals) -> None:
        """Take in what the vector of ``step`` said."""
        self._desk.learn(totals.order)
        if self.memory is not None:
            self.memory.learn(step, totals)

    def is_due(self, step: int) -> bool:
        """Whether a Snapshot of ``step`` is to be taken, asked once at its end: `carry_out` then takes it."""
        for left_out in () if self.memory is None else self.memory.take_left_out():
            self._desk.leave_out(left_out)
        self._order = self._desk.due(step)
        self._is_in_memory = self.memory is not None and self.memory.reach(step, is_ordered=self._order is not None)
        return self._order is not None or self._is_in_memory

    def warm_up(self, step: int) -> None:
        """After the first step, when the optimizer's state is there and so the size of a Snapshot is known."""
        if self._proof is not None:
            self._proof.ready()
        if self.memory is not None:
            return  # its side thread does
        reshard(self._state.model)
        rank, world_size = self._spec.rank, self._spec.world.size
        snapshot = capture(self._state, rank=rank, world_size=world_size)
        try:
            self._stager.warm(snapshot, attempt=self._spec.attempt, step=step, rank=rank, world_size=world_size)
        except KeeperUnreachable as error:
            _log.warning("rank %d: buffers stay cold: %s", rank, error)

    def carry_out(self, step: int) -> None:
        """Take the Snapshot that `is_due` spoke of. Progress stands at ``step``."""
        order, self._order = self._order, None
        wait_s = 0.0 if order is None else self._wait_s(order)
        record = self._probe(step, order)
        before = self._share.begin()
        is_taken = self._take(step, order, wait_s, record)
        if is_taken and self._stager.drafted is not None:
            is_beside = self.memory is not None and not wait_s
            self._share.end(step, before, self._stager.drafted, is_beside=is_beside)

    def _probe(self, step: int, order: BoundOrder | None) -> ProofRecord | None:
        """Of what goes to the store, and on all ranks: whether a buffer is free for its save shows only later."""
        if self._proof is None or order is None or order.kind is OrderKind.PART:
            return None
        with self._pulse.during(Phase.CHECKPOINTING):
            return self._proof.take(self._state, step, is_pressed=order.kind.is_bounded)

    def _take(self, step: int, order: BoundOrder | None, wait_s: float, proof: ProofRecord | None) -> bool:
        """``order`` None: for memory alone. False: no Snapshot was taken."""
        if order is None:
            assert self.memory is not None  # nothing else was due
            return self.memory.take(step, ship=False, wait_s=None)
        with self._pulse.during(Phase.CHECKPOINTING):
            if self.memory is not None:
                ship = order.kind is not OrderKind.PART
                is_bounded = order.kind.is_bounded
                is_staged = self.memory.take(step, ship=ship, wait_s=wait_s or None, bounded=is_bounded, proof=proof)
            else:
                is_staged = self._stage_in_time(step, wait_s, bounded=order.kind.is_bounded, proof=proof)
        if not is_staged:
            self._desk.leave_out(step)
        if order.kind.ends_attempt and step != self._settings.total_steps:
            self.is_leaving = True
            self._pulse.beat(Phase.LEAVING)
        return is_staged

    def close(self) -> None:
        """Let go of the state."""
        if self.memory is not None:
            self.memory.close()

    def _wait_s(self, order: BoundOrder) -> float:
        """How long to wait for a buffer: a save on the way is left out rather than waited for."""
        checkpoint = self._settings.checkpoint
        if order.step == self._settings.total_steps:
            return checkpoint.final_timeout_s
        match order.kind:
            case OrderKind.LEAVE | OrderKind.LEAVE_BOUNDED:
                return checkpoint.leave_timeout_s
            case OrderKind.PART:
                return min(_PART_S, checkpoint.leave_timeout_s)
            case _:
                return 0.0

    def _stage_in_time(self, step: int, wait_s: float, *, bounded: bool, proof: ProofRecord | None) -> bool:
        """Stage; a Keeper that is away is waited for like a buffer that is not free. Training outlives it."""
        until = time.monotonic() + wait_s
        while True:
            try:
                return self._stage(step, max(0.0, until - time.monotonic()), bounded=bounded, proof=proof)
            except KeeperUnreachable as error:
                self._check()
                if time.monotonic() >= until:
                    _log.warning("rank %d: step %d is not saved: %s", self._spec.rank, step, error)
                    return False
                time.sleep(_KEEPER_AWAY_S)

    def _stage(self, step: int, wait_s: float, *, bounded: bool, proof: ProofRecord | None) -> bool:
        reshard(self._state.model)  # a loop's own evaluation may have left parameters whole
        rank, world_size = self._spec.rank, self._spec.world.size
        snapshot = capture(self._state, rank=rank, world_size=world_size)
        attach(snapshot, proof)
        result = self._stager.stage(
            snapshot,
            attempt=self._spec.attempt,
            step=step,
            rank=rank,
            world_size=world_size,
            wait_s=wait_s,
            bounded=bounded,
            stalled_s=0.0 if proof is None else proof.seconds,
        )
        if not result.staged:
            _log.info("rank %d: step %d is not saved: no buffer came free within %g s", rank, step, wait_s)
            return False
        _log.info("rank %d staged step %d: %d bytes in %.3f s", rank, step, result.num_bytes, result.stall_s)
        return True
