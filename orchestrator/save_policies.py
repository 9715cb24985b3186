"""Which save policies speak for a Run, by its settings. What they say is their own matter."""

from __future__ import annotations

from typing import assert_never

from orchestrator.bounds_policy import BoundsPolicy
from orchestrator.cadence_policy import CadencePolicy
from orchestrator.hazard_policy import HazardPolicy
from orchestrator.instability_policy import InstabilityPolicy
from orchestrator.metric_policy import BestMetricPolicy
from orchestrator.pressure_policy import PressurePolicy
from orchestrator.save_config import PolicyName, SavePolicyConfig
from orchestrator.save_facts import SavePolicy
from storage.config import CheckpointConfig

__all__ = ["DEFAULT_POLICIES", "least_interval_s", "policies_of"]

DEFAULT_POLICIES: tuple[PolicyName, ...] = ("hazard", "memory-pressure")
"""Where no cadence is fixed and none are named."""


def policies_of(policy: SavePolicyConfig, checkpoint: CheckpointConfig) -> tuple[SavePolicy, ...]:
    """A fixed cadence speaks for itself, beside the policies that are named; without one, bounds always hold."""
    is_fixed = checkpoint.every_steps is not None or checkpoint.every_s is not None
    named = policy.policies
    if named is None:
        named = () if is_fixed else DEFAULT_POLICIES
    speaking = [_policy(name, policy) for name in dict.fromkeys(named)]
    if checkpoint.every_s is not None:
        speaking.insert(0, CadencePolicy(checkpoint.every_s))
    if not is_fixed:
        speaking.append(BoundsPolicy(policy))
    return tuple(speaking)


def least_interval_s(policy: SavePolicyConfig, checkpoint: CheckpointConfig) -> float:
    """``policy.min_interval_s``, which a denser cadence that was asked for in so many words overrules."""
    if checkpoint.every_s is None:
        return policy.min_interval_s
    return min(policy.min_interval_s, checkpoint.every_s)


def _policy(name: PolicyName, config: SavePolicyConfig) -> SavePolicy:
    match name:
        case "hazard":
            return HazardPolicy(config)
        case "best-metric":
            return BestMetricPolicy()
        case "instability":
            return InstabilityPolicy(config.instability)
        case "memory-pressure":
            return PressurePolicy(config.pressure)
        case _:
            assert_never(name)
