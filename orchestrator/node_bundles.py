"""The places for workers that a Run holds on one node: bundles of one or more placement groups.

A placement group cannot change its size, so a node that is to hold more workers later gets another one, and what is
given back are whole groups that no worker is in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestrator.placement import NodePlacement

__all__ = ["Bundle", "NodeBundles"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """One worker's place."""

    placement: NodePlacement
    index: int

    def actor_options(self) -> dict[str, Any]:
        return self.placement.actor_options(self.index)


class NodeBundles:
    """Of one node. ``place``: makes a placement group of so many bundles there."""

    def __init__(self, place: Callable[[int], NodePlacement], count: int) -> None:
        self._place = place
        self._free: list[Bundle] = []
        self.placements: list[NodePlacement] = []
        self.grow(count)

    @property
    def num(self) -> int:
        return sum(placement.count for placement in self.placements)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def grow(self, count: int) -> None:
        placement = self._place(count)
        self.placements.append(placement)
        self._free += [Bundle(placement=placement, index=index) for index in range(count)]

    def take(self) -> Bundle:
        return self._free.pop(0)

    def give_back(self, bundle: Bundle) -> None:
        self._free.append(bundle)

    def trim(self, most: int) -> list[NodePlacement]:
        """Groups that no worker is in, of together at most ``most`` bundles, for the caller to remove."""
        gone: list[NodePlacement] = []
        for placement in reversed(self.placements):
            num_free = sum(bundle.placement is placement for bundle in self._free)
            if num_free == placement.count and sum(one.count for one in gone) + placement.count <= most:
                gone.append(placement)
        self.placements = [placement for placement in self.placements if placement not in gone]
        self._free = [bundle for bundle in self._free if bundle.placement not in gone]
        return gone
