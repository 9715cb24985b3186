"""The whole run configuration: composes the settings of the three packages. Checked at birth, immutable after."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from orchestrator.save_config import SavePolicyConfig
from storage.config import CheckpointConfig
from workers.config import DataConfig, EvalConfig, ModelConfig, OptimConfig, Reproducible

__all__ = ["FailureConfig", "RunConfig", "RunSettings", "WorldConfig"]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSettings(_Settings):
    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    url: str = Field(min_length=1, description="directory or URL that holds everything of the run")
    steps: int = Field(ge=1)
    resume: str = Field("auto", description="auto, none, a step number, or the URL of another run")
    allow_partial: bool = Field(False, description="load what fits when model and Checkpoint differ")
    resume_levels: Literal["all", "L1"] = Field(
        "all",
        description="L1: leave the optimizer's moments out, where `raysume doctor` found them damaged in every step",
    )
    trace_every: int | None = Field(
        None, ge=1, description="every so many steps digests of weights, optimizer and random state go into the events"
    )


class WorldConfig(_Settings):
    min_workers: int = Field(1, ge=1)
    max_workers: int = Field(1, ge=1)
    workers_per_node: int | None = Field(None, ge=1, description="cap per node; null: as many as resources allow")
    resources_per_worker: dict[str, float] = Field({"CPU": 1.0})
    start_grace_s: float = Field(10.0, ge=0, description="wait for max_workers at the start once min_workers are there")
    max_wait_s: float = Field(1800.0, gt=0, description="longest wait below min_workers")
    threads_per_worker: int | None = Field(1, ge=1, description="OMP_NUM_THREADS of a CPU worker")
    accept_joins: bool = Field(True, description="take new nodes in while the run goes on")
    spares: int = Field(0, ge=0, description="workers kept warm beside max_workers; one takes a lost member's place")
    join_window_s: float = Field(
        5.0, ge=0, description="how long a ready worker waits for others that are starting, to join together with them"
    )
    join_gain_ratio: float = Field(
        1.0,
        ge=0,
        description="join when it saves more than so many times its cost until the last step; 0: always",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_workers > self.max_workers:
            raise ValueError(f"world.min_workers {self.min_workers} exceeds world.max_workers {self.max_workers}")
        return self


class FailureConfig(_Settings):
    """Separate budgets: a reclaimed machine never uses up the budget of a bug. -1: no limit."""

    max_user_errors: int = Field(0, ge=-1, description="retries after an error of the training code")
    max_infrastructure: int = Field(-1, ge=-1, description="retries after lost nodes, workers or hangs")
    max_preemptions: int = Field(-1, ge=-1)
    max_node_failures: int | None = Field(
        3, ge=1, description="worker failures on one node within node_failures_window_s that block it; null: never"
    )
    node_failures_window_s: float = Field(3600.0, gt=0)
    max_same_step_failures: int | None = Field(
        3, ge=2, description="stop once workers were lost, or hung, at the same step this often; null: never"
    )
    nan: Literal["rollback", "stop", "ignore"] = Field(
        "rollback", description="a loss or gradient norm that is not finite: go back and leave its samples out, or stop"
    )
    loss_spike: float | None = Field(
        None, gt=1, description="roll back as well where the loss is so many times its running median; null: never"
    )
    max_skipped_windows: int = Field(8, ge=0, description="global batches that may be left out before the run stops")
    slow_node: Literal["report", "exclude"] = Field(
        "report", description="exclude: part from a node that computes slower than the others where that pays"
    )
    slow_ratio: float = Field(1.5, gt=1, description="from how many times the others' computing time on a node is slow")
    slow_node_rest_s: float = Field(3600.0, gt=0, description="how long a node that was excluded is not used")
    group_timeout_s: float = Field(120.0, gt=0, description="collective time-out for vanished peers")
    settle_s: float = Field(
        1.0,
        gt=0,
        description="how long a node that shows no life may take to answer after a fault before it counts as lost; "
        "10 s where its connection stands, no time where its connections have ended",
    )
    poll_s: float = Field(0.25, gt=0)
    starting_s: float = Field(300.0, gt=0, description="limit: start of a worker process and its imports")
    forming_s: float = Field(60.0, gt=0)
    loading_s: float = Field(600.0, gt=0)
    compiling_s: float = Field(600.0, gt=0, description="limit: first step of an Attempt")
    training_s: float = Field(60.0, gt=0, description="limit: one step")
    evaluating_s: float = Field(600.0, gt=0)
    checkpointing_s: float = Field(600.0, gt=0)
    leaving_s: float = Field(120.0, gt=0)
    silent_s: float = Field(15.0, gt=0, description="limit: no answer to a heartbeat call at all")


class RunConfig(_Settings):
    """One run, from its YAML file and dotted overrides."""

    run: RunSettings
    seed: int = Field(0, ge=0, lt=1 << 63)
    reproducible: Reproducible = Field(
        False, description="the same bits at any world size; exact: by a fold of gradients in leaf order, as the proof"
    )
    world: WorldConfig = WorldConfig()
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    policy: SavePolicyConfig = SavePolicyConfig()
    failure: FailureConfig = FailureConfig()
    log_level: Literal["DEBUG", "INFO", "WARNING"] = "INFO"

    @model_validator(mode="before")
    @classmethod
    def _never_rounds_in_haste(cls, data: Any) -> Any:
        """What is reproducible leaves in the usual form, however short the time."""
        if not isinstance(data, dict) or not data.get("reproducible"):
            return data
        policy = data.get("policy") or {}
        deadline = policy.get("deadline") or {} if isinstance(policy, dict) else None
        if not isinstance(deadline, dict):
            return data
        return {**data, "policy": {**policy, "deadline": {"cheaper_form": "none", **deadline}}}

    @model_validator(mode="after")
    def _can_be_reproducible(self) -> Self:
        problem = next(_not_reproducible(self), None) if self.reproducible else None
        if problem is not None:
            raise ValueError(f"reproducible: {str(self.reproducible).lower()} with {problem}")
        return self


def _not_reproducible(config: RunConfig) -> Iterator[str]:
    """What the same bits cannot be had with, and what to set instead."""
    checkpoint, model = config.checkpoint, config.model
    if model.compile:
        yield "model.compile: which kernels it comes to is not known to be the same on every rank; set it to false"
    if config.world.threads_per_worker is None and not config.world.resources_per_worker.get("GPU"):
        yield "world.threads_per_worker: null: a sum's bits depend on the number of threads; set it to a number"
    if config.reproducible == "exact" and model.parallelism != "fsdp":
        yield (
            f"model.parallelism: {model.parallelism}: gradients are folded leaf by leaf under FSDP2 only; set"
            " model.parallelism: fsdp, or reproducible: true"
        )
    if checkpoint.fidelity != "lossless":
        yield f"checkpoint.fidelity: {checkpoint.fidelity}: rounded moments do not go on alike; set lossless"
    if config.policy.deadline.cheaper_form != "none":
        yield "policy.deadline.cheaper_form: bounded: a leave in haste would round the moments; set none"
    for rule in checkpoint.levels:
        if rule.fidelity == "bounded" or rule.is_omission or rule.stays_in_memory:
            yield f"the rule {rule.pattern!r} of checkpoint.levels: a resume would lack what it changes; leave it out"
    if config.failure.loss_spike is not None:
        yield (
            "failure.loss_spike: what is a spike is told by the losses since the last start, so a run that was"
            " interrupted may leave out other steps; set null"
        )
