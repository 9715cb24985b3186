"""The events of an imagined run that trains without any model: every value of a step follows from its number alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Change", "DrillEvents", "step_fields"]

Change = Callable[[dict[str, Any]], object]


class DrillEvents:
    """``changes``: what is done to the event of a step, by step, whenever it is made."""

    def __init__(self, changes: Mapping[int, Change] | None = None) -> None:
        self.events: list[dict[str, Any]] = []
        self._changes = changes or {}
        self._attempt, self._step, self._size = 0, 0, 0
        self._members: list[tuple[str, int]] = []
        self._num_processes = 0
        self._at_s = 0.0
        self.emit("run_started", run_id="r", steps=0, url="", start_unix_s=0.0, is_new=True)

    def emit(self, event: str, *, step: int | None = None, attempt: int | None = None, **fields: Any) -> None:
        self._at_s += 0.25
        self.events.append({"event": event, "t_s": self._at_s, "attempt": attempt, "step": step, **fields})

    def begin(
        self, size: int, *, restored: int = 0, cause: str = "start", source: str = "own-memory", kept: int = 0
    ) -> DrillEvents:
        """A new Attempt of ``size`` workers goes on from step ``restored``. The last ``kept`` of the Attempt before are
        members again, all others are new processes; the worker of process 7 is w7, on node n7."""
        self._attempt, self._step, self._size = self._attempt + 1, restored, size
        self._members = self._members[len(self._members) - kept :]
        while len(self._members) < size:
            self.add_worker()
        self.emit("attempt_started", attempt=self._attempt, world_size=size, cause=cause, restored_step=restored,
                  restored_from=source if restored else "none", detected_s=self._at_s,
                  members=[worker for worker, _ in self._members])  # fmt: skip
        return self

    def add_worker(self) -> None:
        """One that is a member of the next Attempt, where that is large enough."""
        self._num_processes += 1
        pid = self._num_processes
        self._members.append((f"w{pid}", pid))
        self.emit("worker_ready", worker=f"w{pid}", node_id=f"n{pid}", pid=pid)

    def train(self, until: int) -> DrillEvents:
        while self._step < until:
            self._step += 1
            event = step_fields(self._step)
            if (change := self._changes.get(self._step)) is not None:
                change(event)
            self.emit("step", step=self._step, attempt=self._attempt, world_size=self._size, step_s=0.2,
                      finished_s=self._at_s, **event)  # fmt: skip
        return self

    def strike(self, verb: str, planned: int, detail: str = "node 2", *, pid: int | None = None) -> DrillEvents:
        """``pid`` None: of the first member."""
        process = self._members[0][1] if pid is None else pid
        self.emit("chaos", verb=verb, planned_step=planned, at_step=self._step, detail=detail, node_id=f"n{process}",
                  pid=process)  # fmt: skip
        return self

    def end(self, digest: str | None = None) -> list[dict[str, Any]]:
        """The last event, and all of them. ``digest`` None: that of the last step's weights."""
        weights = digest or step_fields(self._step)["weights_digest"]
        self.emit("run_finished", status="finished", exit_reason="", exit_code=0, weights_digest=weights)
        return self.events


def step_fields(step: int) -> dict[str, Any]:
    return {
        "loss": 1.0 + math.exp(-step / 9),
        "grad_norm": 0.5 + 1.0 / step,
        "lr": 1e-3 * min(1.0, step / 5),
        "tokens": step * 64,
        "position": step * 4,
        "sample_chain": f"chain-{step}",
        "weights_digest": f"weights-{step}",
        "optimizer_digest": f"optimizer-{step}",
        "schedule_digest": f"schedule-{step}",
        "rest_digest": f"rest-{step}",
        "rng_digest": f"rng-{step}",
    }
