"""What a worker process is told once, when it is made: the Run's identity and the settings of every part it runs.

The orchestrator builds it from the run configuration; workers never see that configuration itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

from storage.config import CheckpointConfig
from workers.config import DataConfig, EvalConfig, ModelConfig, OptimConfig, Reproducible

__all__ = ["SignalSettings", "WorkerSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalSettings:
    """What is measured for the save policies, every ``every_steps`` steps: ``device_share`` and ``host_share`` of the
    memory in use are those from which a rank is pressed."""

    every_steps: int
    device_share: float
    host_share: float

    def measures(self, step: int) -> bool:
        return step % self.every_steps == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """``loop_config`` is handed to a user's train loop as it stands; ``num_threads`` None leaves torch's choice.

    ``must_be_finite``, ``loss_spike``: which steps may not stand, see `workers.step_check`. ``trace_every``: every so
    many steps digests of the whole state are reported (`workers.step_trace`); None: never.
    """

    run_id: str
    seed: int
    total_steps: int
    model: ModelConfig
    data: DataConfig
    signals: SignalSettings
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    loop_config: Mapping[str, JsonValue] = field(default_factory=dict)
    num_threads: int | None = 1
    must_be_finite: bool = True
    loss_spike: float | None = None
    reproducible: Reproducible = False
    trace_every: int | None = None

    def __post_init__(self) -> None:
        if self.total_steps < 1:
            raise ValueError(f"total_steps is {self.total_steps}; a Run has at least one step")
