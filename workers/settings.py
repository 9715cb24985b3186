"""What a worker process is told once, when it is made: the Run's identity and the settings of every part it runs.

The orchestrator builds it from the run configuration; workers never see that configuration itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

from storage.config import CheckpointConfig
from workers.config import DataConfig, EvalConfig, ModelConfig, OptimConfig

__all__ = ["WorkerSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """``loop_config`` is handed to a user's train loop as it stands; ``num_threads`` None leaves torch's choice.

    ``must_be_finite``, ``loss_spike``: which steps may not stand, see `workers.step_check`.
    """

    run_id: str
    seed: int
    total_steps: int
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    loop_config: Mapping[str, JsonValue] = field(default_factory=dict)
    num_threads: int | None = 1
    must_be_finite: bool = True
    loss_spike: float | None = None

    def __post_init__(self) -> None:
        if self.total_steps < 1:
            raise ValueError(f"total_steps is {self.total_steps}; a Run has at least one step")
