"""Hazard and cost: how often the World breaks and what a save takes, as estimates from what was seen so far. Pure.

When to save because of it is hazard_policy's and bounds_policy's choice. Nothing here divides by zero: every rate is
above zero and finite, and every estimate without a measurement is None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median, median_low

from orchestrator.save_config import BathtubConfig, HazardConfig
from orchestrator.save_facts import ClusterFacts, SaveTimes

__all__ = [
    "bathtub_rate",
    "costly_faults",
    "node_rate",
    "predicted_write_s",
    "recent_write_s",
    "save_cost_s",
    "time_in_words",
    "usual_write_s",
    "world_mtbf_s",
]

_RECENT = 9  # saves that tell what a save costs: enough for a median that one slow save does not move
_LATEST = 3  # saves of which the slowest tells how long the next may take: a store that turned slow counts at once
_SHORTEST_MTBF_S = 1e-3
_DAY_S = 86_400.0
_UNITS = ((0.95, 1e-3, "ms"), (120.0, 1.0, "s"), (7200.0, 60.0, "min"), (2 * _DAY_S, 3600.0, "h"))


def costly_faults(cluster: ClusterFacts) -> int:
    """Faults after which the Run had to go on from a save."""
    return max(0, cluster.faults - cluster.survived)


def node_rate(cluster: ClusterFacts, config: HazardConfig) -> float:
    """Failures per second of one node that memory does not survive, for only those cost what came after the last save:
    the mean of a Gamma posterior, whose prior weighs as ``prior_weight`` failures in as many times
    ``prior_node_mtbf_s``."""
    weight = config.prior_weight
    return (weight + costly_faults(cluster)) / (weight * config.prior_node_mtbf_s + max(0.0, cluster.exposure_node_s))


def bathtub_rate(age_s: float, config: BathtubConfig) -> float | None:
    """Failures per second of one node of this age; None beyond the model's end, where no node should live any more.

    The hazard f / (1 - F) of F(t) = A * (1 - exp(-t / tau1) + exp((t - b) / tau2)).
    """
    age_s = max(0.0, age_s)
    late = (age_s - config.limit_s) / config.late_s
    if late > 1.0:  # F passes 1 well before, where A is at least 0.27; and exp of much more overflows
        return None
    infant, wearout = math.exp(-age_s / config.early_s), math.exp(late)
    survival = 1.0 - config.share * (1.0 - infant + wearout)
    if survival <= 0.0:
        return None
    return config.share * (infant / config.early_s + wearout / config.late_s) / survival


def world_mtbf_s(cluster: ClusterFacts, config: HazardConfig) -> float:
    """Mean time until any node of the World fails. A node whose age is not known, or out of the bathtub's range, has
    the constant rate, and so has one in the bathtub's flat bottom: what this Run has seen is its least."""
    constant = node_rate(cluster, config)
    num_nodes = max(1, cluster.num_nodes)
    if config.model == "constant":
        return max(_SHORTEST_MTBF_S, 1.0 / (constant * num_nodes))
    ages = cluster.node_ages_s[:num_nodes]
    rates = [max(constant, bathtub_rate(age, config.bathtub) or 0.0) for age in ages]
    rate = math.fsum(rates) + constant * (num_nodes - len(ages))
    return max(_SHORTEST_MTBF_S, 1.0 / rate)


def save_cost_s(saves: Sequence[SaveTimes]) -> float | None:
    """Training time that one save costs: its stall and what it slows down, each the median of recent saves."""
    if not saves:
        return None
    recent = saves[-_RECENT:]
    slowdowns = [save.slowdown_s for save in recent if save.slowdown_s is not None]
    return max(0.0, median(save.stall_s for save in recent)) + max(0.0, median(slowdowns) if slowdowns else 0.0)


def usual_write_s(saves: Sequence[SaveTimes]) -> float | None:
    """Time from a Snapshot to its Commit, the median of recent saves."""
    return max(0.0, median(save.write_s for save in saves[-_RECENT:])) if saves else None


def predicted_write_s(saves: Sequence[SaveTimes], *, first_s: float) -> float:
    """How long the next save may take until it is durable, on the safe side; ``first_s`` before any was measured."""
    return max((max(0.0, save.write_s) for save in saves[-_LATEST:]), default=first_s)


def recent_write_s(saves: Sequence[SaveTimes], *, first_s: float) -> float:
    """How long saves take by now, without the one that was slow alone; ``first_s`` before any was measured."""
    latest = saves[-_LATEST:]
    return max(0.0, median_low(save.write_s for save in latest)) if latest else first_s


def time_in_words(seconds: float) -> str:
    """``31 ms``, ``3.1 s``, ``45 s``, ``7.7 min``, ``41 min``, ``2.4 h``, ``38 d``: short, for a line of figures."""
    if seconds <= 0.0:
        return "0 s"
    for limit, unit, name in _UNITS:
        if seconds < limit:
            number = seconds / unit
            return f"{number:.0f} {name}" if number >= 9.95 else f"{number:.1f} {name}".replace(".0 ", " ")
    return f"{seconds / _DAY_S:.0f} d"
