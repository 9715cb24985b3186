"""Where workers and per-node actors go: one placement group per node, pinned by node id, removed when the node is lost.

A group that spans nodes would reschedule onto the next free node when one dies and hold it; one per node cannot.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

__all__ = ["NodePlacement", "on_node"]


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    """Strategy for an actor that belongs to one node and to no other."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


class NodePlacement:
    """The resources of ``count`` workers on one node, held as one placement group."""

    def __init__(self, run_id: str, node_id: str, count: int, resources_per_worker: dict[str, float]) -> None:
        self.count = count
        self.node_id = node_id
        self._resources = dict(resources_per_worker)
        self._group: PlacementGroup = placement_group(
            [dict(resources_per_worker) for _ in range(count)],
            strategy="STRICT_PACK",
            name=f"raysume-{run_id}-{node_id[:12]}",
            bundle_label_selector=[{"ray.io/node-id": node_id}] * count,
        )

    def actor_options(self, index: int) -> dict[str, Any]:
        """Ray options that put an actor into bundle ``index`` with that bundle's resources."""
        resources = dict(self._resources)
        return {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
        }

    def remove(self) -> None:
        """Give the resources back; kills what still runs in the group."""
        if ray.is_initialized():
            remove_placement_group(self._group)
