"""The hazard policy: save at the interval that loses least between what saves cost and what failures take. Pure.

The estimates are made in hazard.py; the longest interval and the work at risk are bounds_policy's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from orchestrator.hazard import costly_faults, save_cost_s, time_in_words, usual_write_s, world_mtbf_s
from orchestrator.save_config import SavePolicyConfig
from orchestrator.save_facts import Opinion, SaveFacts

__all__ = ["HazardPolicy", "Interval", "save_interval"]

_LARGE_STATE_BYTES = 100e9
_FIRST_S = 720.0
_FIRST_LARGE_S = 2700.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """From one save to the next. ``floor_s``: what it never goes below, however dear the lost work is. ``why``: the
    figures it rests on, in words."""

    seconds: float
    floor_s: float
    why: str


class HazardPolicy:
    """``HazardPolicy(policy)``: one for a Run, from the whole of ``RunConfig.policy``."""

    def __init__(self, policy: SavePolicyConfig) -> None:
        self._policy = policy

    @property
    def name(self) -> str:
        return "hazard"

    def opinion(self, facts: SaveFacts) -> Opinion:
        """Due one interval after the last save, or after the last Commit where no save is on its way to become one: an
        Attempt that lives longer than the interval and a save's cost has a Commit."""
        interval = save_interval(facts, self._policy)
        due_at_s = facts.last_save_at_s + interval.seconds
        if not facts.unsettled:
            soonest_at_s = facts.last_save_at_s + interval.floor_s
            due_at_s = min(due_at_s, max(facts.durable_at_s + interval.seconds, soonest_at_s))
        return Opinion(policy=self.name, due_at_s=due_at_s, why=f"{_since_commit(facts)}, {interval.why}")


def _since_commit(facts: SaveFacts) -> str:
    since_s = facts.now_s - facts.durable_at_s
    if math.isinf(since_s):
        return f"no commit since step {facts.durable_step}" if facts.durable_step else "no commit yet"
    since = time_in_words(max(0.0, since_s))
    return f"{since} since commit" if facts.durable_step else f"{since} without a commit"


def save_interval(facts: SaveFacts, policy: SavePolicyConfig) -> Interval:
    """sqrt(2 * cost * MTBF) within [min_interval_s, max_interval_s], yet never shorter than a save costs or takes to
    write; the first interval while nothing broke yet or a save's cost is not known, but no more than half of the MTBF
    where that is: a World that breaks more often than it saves would never come on."""
    cost_s, write_s = save_cost_s(facts.saves), usual_write_s(facts.saves)
    floor_s = max(policy.min_interval_s, cost_s or 0.0, write_s or 0.0)
    unlearned = _unlearned(facts, policy, cost_s)
    mtbf_s = world_mtbf_s(facts.cluster, policy.hazard)
    if unlearned is None and cost_s is not None:
        wanted_s = math.sqrt(2.0 * cost_s * mtbf_s)
        why = f"MTBF {time_in_words(mtbf_s)}, cost {time_in_words(cost_s)}"
    else:
        wanted_s = _first_interval_s(facts, policy)
        why = f"{unlearned}: first interval {time_in_words(wanted_s)}"
        if _is_hazard_known(facts, policy) and mtbf_s / 2.0 < wanted_s:
            wanted_s = mtbf_s / 2.0
            why = f"{unlearned}: half of the MTBF, {time_in_words(mtbf_s)}"
    seconds = max(min(wanted_s, policy.max_interval_s), floor_s)
    return Interval(seconds=seconds, floor_s=floor_s, why=why + _bound(seconds, wanted_s, policy, write_s))


def _unlearned(facts: SaveFacts, policy: SavePolicyConfig, cost_s: float | None) -> str | None:
    """What is not known yet of all that the formula needs; None: nothing."""
    if cost_s is None:
        return "no save measured yet"
    if cost_s <= 0.0:
        return "saves cost nothing that was measured"
    if _is_hazard_known(facts, policy):
        return None
    return "memory survived every failure yet" if facts.cluster.faults else "no failure seen yet"


def _is_hazard_known(facts: SaveFacts, policy: SavePolicyConfig) -> bool:
    """A bathtub is knowledge from outside: it speaks before anything broke."""
    return costly_faults(facts.cluster) > 0 or (policy.hazard.model == "bathtub" and bool(facts.cluster.node_ages_s))


def _first_interval_s(facts: SaveFacts, policy: SavePolicyConfig) -> float:
    if policy.hazard.first_interval_s is not None:
        return policy.hazard.first_interval_s
    # What a model of the user's own stores is known by its first save alone.
    state_bytes = max(facts.cluster.state_bytes or 0, facts.saves[-1].raw_bytes if facts.saves else 0)
    is_large = state_bytes > _LARGE_STATE_BYTES
    return _FIRST_LARGE_S if is_large else _FIRST_S


def _bound(seconds: float, wanted_s: float, policy: SavePolicyConfig, write_s: float | None) -> str:
    """Which limit the interval has come to, for the reader of ``why``; nothing where it is what the formula says."""
    if seconds == wanted_s:
        return ""
    if seconds == policy.max_interval_s:
        return f", at policy.max_interval_s {policy.max_interval_s:g}"
    if seconds == write_s:
        return f", a save takes {time_in_words(seconds)} to write"
    if seconds == policy.min_interval_s:
        return f", at policy.min_interval_s {policy.min_interval_s:g}"
    return ", not below the cost"
