"""Settings of when to save: which policies speak, and their constants. Checked at birth, immutable after."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "FIRST_SAVE_S",
    "BathtubConfig",
    "DeadlineConfig",
    "FeedbackConfig",
    "HazardConfig",
    "InstabilityConfig",
    "PolicyName",
    "PressureConfig",
    "SavePolicyConfig",
]

PolicyName = Literal["hazard", "instability", "best-metric", "memory-pressure"]
"""Policies that can be switched off. Bounds and deadlines always hold; a fixed cadence is set in ``checkpoint``."""


FIRST_SAVE_S = 10.0
"""What a save is taken to take of which nothing is known."""


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class BathtubConfig(_Settings):
    """A node's life under constrained preemption: F(t) = A * (1 - exp(-t / tau1) + exp((t - b) / tau2)).

    The shape and the size of its constants: Kadupitiya, Jadhao, Sharma (HPDC 2020), for VMs that live 24 h at most.
    """

    share: float = Field(0.45, ge=0.3, lt=1, description="A: the share that is lost in the early phase")
    early_s: float = Field(3600.0, gt=0, description="tau1: how quickly the early phase passes")
    late_s: float = Field(2880.0, gt=0, description="tau2: how quickly the late phase sets in")
    limit_s: float = Field(86_400.0, gt=0, description="b: the age at which nodes are reclaimed")


class HazardConfig(_Settings):
    """Interval from what a save costs and how often the World breaks: sqrt(2 * cost * MTBF) (Young 1974)."""

    model: Literal["constant", "bathtub"] = Field(
        "constant",
        description="constant: failures come at one rate, learned as the run goes; bathtub: a node's hazard depends on "
        "its age, as of VMs that are reclaimed within 24 h",
    )
    prior_node_mtbf_s: float = Field(86_400.0, gt=0, description="mean time to failure of one node before any was seen")
    prior_weight: float = Field(0.1, gt=0, description="for how many seen failures the prior counts")
    bathtub: BathtubConfig = BathtubConfig()
    first_interval_s: float | None = Field(
        None,
        gt=0,
        description="interval until a save was measured and something broke; null: 12 min, 45 min for a state above "
        "100 GB",
    )


class InstabilityConfig(_Settings):
    """Save ahead of trouble: a score of loss curvature and gradient variance, above a threshold."""

    formula: Literal["published", "corrected"] = Field(
        "corrected",
        description="published: 0.7 * sigmoid(|curvature| / 0.03) + 0.3 * (1 - sigmoid(variance / 1e-5)), whose score "
        "lies in [0.35, 0.85); corrected: starts at 0, low variance lowers it, scales are running quantiles",
    )
    threshold: float = Field(0.65, gt=0, lt=1)
    curvature_weight: float = Field(0.7, ge=0, le=1)
    curvature_scale: float = Field(0.03, gt=0, description="published formula: |curvature| of one sigmoid unit")
    variance_scale: float = Field(1e-5, gt=0, description="published formula: variance of one sigmoid unit")
    quantile: float = Field(0.9, gt=0, lt=1, description="corrected formula: the running quantile that is the scale")
    window: int = Field(50, ge=5, description="corrected formula: of how many evaluations the quantile is taken")
    lag: int = Field(3, ge=0, description="corrected formula: how many evaluations are too new for the quantile")
    curvature_gain: float = Field(0.8, gt=0, description="corrected formula: sigmoid units of the usual curvature")
    variance_gain: float = Field(1.0, gt=0, description="corrected formula: sigmoid units of the usual variance")
    min_interval_steps: int = Field(10, ge=1, description="steps from one save of this policy to the next")


class FeedbackConfig(_Settings):
    """How stored size and write time move the instability threshold: dearer saves need a better reason."""

    size_reference_bytes: float = Field(1e9, gt=0, description="stored size that moves nothing")
    size_gain: float = Field(0.05, ge=0, description="added for each doubling above the reference")
    write_reference_s: float = Field(10.0, gt=0, description="time from Snapshot to Commit that moves nothing")
    write_gain: float = Field(0.02, ge=0, description="added for each doubling above the reference")
    max_offset: float = Field(0.2, ge=0, lt=1)


class DeadlineConfig(_Settings):
    """A preemption notice: the latest safe start of the last save is deadline - predicted save time - margin."""

    margin_s: float = Field(2.0, ge=0)
    cheaper_form: Literal["bounded", "none"] = Field(
        "bounded",
        description="where time is too short for the usual form: bounded rounds the moments within moment_bound",
    )
    first_save_s: float | None = Field(
        None, gt=0, description="predicted time of a save until one was measured; null: by what is known, else 10 s"
    )
    first_bytes_per_s: float = Field(
        50e6, gt=0, description="until a save was measured: what each rank is taken to encode and upload in a second"
    )

    @property
    def guess_s(self) -> float:
        """Of a save of which nothing is known."""
        return FIRST_SAVE_S if self.first_save_s is None else self.first_save_s


class PressureConfig(_Settings):
    """Memory that runs full: a save before the out-of-memory error."""

    device_share: float = Field(0.97, gt=0, le=1, description="device memory in use from which a rank is pressed")
    host_share: float = Field(0.95, gt=0, le=1, description="host memory in use from which a rank is pressed")
    repeat_s: float = Field(600.0, gt=0, description="while the pressure lasts, from the last save to the next")


class SavePolicyConfig(_Settings):
    """When a Checkpoint is saved. With ``checkpoint.every_steps`` or ``every_s`` set, that cadence and of the policies
    those that are listed here by name; with neither, all that are on by default."""

    policies: tuple[PolicyName, ...] | None = Field(
        None, description="null: hazard and memory-pressure; with a fixed cadence none"
    )
    evaluate_every_steps: int = Field(10, ge=1, description="how often signals of the loss and gradient are judged")
    min_interval_s: float = Field(30.0, ge=0, description="least time between two saves, deadlines excepted")
    max_interval_s: float = Field(3600.0, gt=0, description="longest time between two saves")
    max_at_risk_s: float | None = Field(
        180.0, gt=0, description="most training time that may be lost against the nearest Tier; null: no limit"
    )
    hazard: HazardConfig = HazardConfig()
    instability: InstabilityConfig = InstabilityConfig()
    feedback: FeedbackConfig = FeedbackConfig()
    deadline: DeadlineConfig = DeadlineConfig()
    pressure: PressureConfig = PressureConfig()

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_interval_s > self.max_interval_s:
            raise ValueError(
                f"policy.min_interval_s {self.min_interval_s:g} exceeds policy.max_interval_s {self.max_interval_s:g}"
            )
        return self
