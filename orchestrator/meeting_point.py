"""Where ranks find each other: the rendezvous actor on the driver's node, made anew when it is gone."""

from __future__ import annotations

import logging
from typing import Any

import ray

from orchestrator.placement import on_node
from workers.rendezvous import RendezvousActor

__all__ = ["MeetingPoint"]

_log = logging.getLogger(__name__)
_START_S = 120.0  # it imports torch
_ASK_S = 10.0


class MeetingPoint:
    """Owns the actor. Every Attempt uses names of its own in the store, so a new store loses nothing."""

    def __init__(self) -> None:
        self._actor: Any = self._start()
        self._limit_s = _START_S

    def address(self) -> tuple[str, int]:
        """Host and port of a store that answers. Raises ray's errors when none can be had."""
        try:
            found: tuple[str, int] = ray.get(self._actor.address.remote(), timeout=self._limit_s)
        except ray.exceptions.RayError as error:
            _log.warning("the rendezvous does not answer (%s): a new one is made", type(error).__name__)
            ray.kill(self._actor, no_restart=True)
            self._actor = self._start()
            found = ray.get(self._actor.address.remote(), timeout=_START_S)
        self._limit_s = _ASK_S
        return found

    def close(self) -> None:
        ray.kill(self._actor, no_restart=True)

    def _start(self) -> Any:
        here = on_node(ray.get_runtime_context().get_node_id())
        return RendezvousActor.options(num_cpus=0, scheduling_strategy=here).remote(ray.util.get_node_ip_address())
