"""The save policies for a loop without a coordinator: the `SaveTrigger` that `workers.hf_callback` asks on its rank 0.

The same desk and the same pure policies as a Run under a driver. What a single process cannot know is left out: of
other nodes' failures it sees only that it was started again, and of memory pressure nothing.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping

from pydantic import JsonValue

from orchestrator.save_config import SavePolicyConfig
from orchestrator.save_desk import SaveDesk
from orchestrator.save_facts import ClusterFacts
from orchestrator.save_times import SaveCost
from storage.config import CheckpointConfig
from workers.contract import BoundOrder, EvalReport, OrderKind, StepReport
from workers.save_trigger import SaveOver, StepFacts

__all__ = ["DynamicTrigger"]

_NUM_NODES = "GROUP_WORLD_SIZE"  # torchrun's
_WISH = 1  # the number of every Order that the policies asked for


class DynamicTrigger:
    """When saves pay: by what they were seen to cost and how often the training broke. Settings are those of
    ``policy:`` in a configuration; ``instability`` judges only losses that are logged (``logging_steps=1``).

    ``num_nodes``: machines whose loss ends the training; None: as torchrun says, else one.
    """

    def __init__(
        self,
        policy: SavePolicyConfig | None = None,
        *,
        num_nodes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy, self._clock = policy or SavePolicyConfig(), clock
        self._num_nodes = num_nodes or int(os.environ.get(_NUM_NODES, "1"))
        self._faults = self._preemptions = 0
        self._exposure_node_s = 0.0
        self._began_at_s = clock()
        self._desk: SaveDesk | None = None
        self._loss = self._grad_norm = math.nan
        self._best: tuple[float, int] | None = None

    def load(self, state: Mapping[str, JsonValue]) -> None:
        """The process before this one ended: as it was told to, or by a fault."""
        faults, preemptions, exposure = (state.get(name, 0) for name in ("faults", "preemptions", "exposure_node_s"))
        was_planned = bool(state.get("is_planned_end"))
        self._faults = int(_number(faults)) + int(not was_planned)
        self._preemptions = int(_number(preemptions)) + int(was_planned)
        self._exposure_node_s = _number(exposure)

    def state(self, *, is_planned_end: bool) -> dict[str, JsonValue]:
        return {
            "faults": self._faults,
            "preemptions": self._preemptions,
            "exposure_node_s": self._exposure(),
            "is_planned_end": is_planned_end,
        }

    def begin(self, base_step: int, total_steps: int, world_size: int) -> None:
        del world_size  # one process for each accelerator: what is lost is a machine
        self._began_at_s = self._clock()
        self._desk = SaveDesk(self._policy, CheckpointConfig(), total_steps=total_steps)
        self._desk.begin_attempt(base_step, self._began_at_s)

    def take_step(self, facts: StepFacts) -> None:
        now_s = self._clock()
        if facts.loss is not None:
            self._loss = facts.loss
        if facts.grad_norm is not None:
            self._grad_norm = facts.grad_norm
        report = StepReport(
            step=facts.step,
            loss=self._loss,
            grad_norm=self._grad_norm,
            lr=0.0,
            tokens=0,
            position=0,
            sample_chain="",
            step_s=facts.step_s,
            finished_at_s=now_s,
        )
        self._own_desk.take_steps([report], now_s)
        if facts.metric is not None:
            self._take_evaluation(facts.step, facts.metric)

    def due(self, step: int) -> str | None:
        del step  # a wish is for the next boundary, whichever that is
        desk, now_s = self._own_desk, self._clock()
        desk.tell_cluster(self._cluster(), now_s)
        wish = desk.consult(now_s)
        return None if wish is None else wish.reason

    def began(self, step: int) -> None:
        bound = BoundOrder(number=_WISH, kind=OrderKind.SNAPSHOT, step=step)
        self._own_desk.bound(bound, self._clock())

    def over(self, save: SaveOver) -> None:
        if save.failure is not None:
            self._own_desk.gave_up(save.step, failed_at_s=self._clock())
            return
        # Encoding and upload cannot be told apart here; their sum is what matters to the policies.
        cost = SaveCost(
            stall_s=save.stall_s,
            encode_s=0.0,
            upload_s=save.write_s,
            commit_s=0.0,
            stored_bytes=save.stored_bytes,
            raw_bytes=save.raw_bytes,
        )
        self._own_desk.committed(save.step, cost, self._clock())

    @property
    def _own_desk(self) -> SaveDesk:
        assert self._desk is not None  # begin comes first
        return self._desk

    def _cluster(self) -> ClusterFacts:
        return ClusterFacts(
            num_nodes=self._num_nodes,
            faults=self._faults,
            preemptions=self._preemptions,
            exposure_node_s=self._exposure(),
        )

    def _exposure(self) -> float:
        return self._exposure_node_s + self._num_nodes * max(0.0, self._clock() - self._began_at_s)

    def _take_evaluation(self, step: int, metric: float) -> None:
        if self._best is None or metric < self._best[0]:
            self._best = metric, step
        best, best_step = self._best
        self._own_desk.take_evaluation(EvalReport(step=step, loss=metric, best=best, best_step=best_step))


def _number(value: JsonValue) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
