"""Which nodes are not used again in this Run because workers failed on them again and again. Pure; time is an argument.

Counts failures whose cause may be the machine: a worker that died, hung or did not start. A preemption is no failure.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from orchestrator.config import FailureConfig

__all__ = ["BlockList", "NodeFailure"]

_REMEMBERED = 256  # failures of one node


class NodeFailure(StrEnum):
    WORKER_LOST = "worker-lost"
    HANG = "hang"
    NOT_STARTED = "not-started"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    at_s: float
    kind: NodeFailure


class BlockList:
    """A ledger over (node, time, kind). Blocked is blocked for the rest of the Run, until it is lifted."""

    def __init__(self, config: FailureConfig, blocked: Mapping[str, str] | None = None) -> None:
        self._config = config
        self._failures: dict[str, deque[_Seen]] = {}
        self._blocked = dict(blocked or {})

    @property
    def blocked(self) -> dict[str, str]:
        """Node id -> why."""
        return dict(self._blocked)

    def note(self, node_id: str, at_s: float, kind: NodeFailure) -> None:
        """A failure on ``node_id``."""
        self._failures.setdefault(node_id, deque(maxlen=_REMEMBERED)).append(_Seen(at_s=at_s, kind=kind))

    def review(self, now_s: float, spare_capacity: Mapping[str, bool]) -> dict[str, str]:
        """Block the nodes that failed too often of late; returns the new ones with the reason.

        ``spare_capacity``: living nodes, and whether the others can hold ``world.min_workers`` without it. A node that
        they cannot do without stays in use: with it the Run may fail again, without it it certainly stands still.
        """
        limit = self._config.max_node_failures
        if limit is None:
            return {}
        for node_id, seen in self._failures.items():
            recent = [one for one in seen if now_s - one.at_s <= self._config.node_failures_window_s]
            if node_id not in self._blocked and len(recent) >= limit and spare_capacity.get(node_id, False):
                # One at a time: the next one's capacity must be reckoned without this one.
                self._blocked[node_id] = _reason(recent, self._config)
                return {node_id: self._blocked[node_id]}
        return {}

    def lift(self, node_id: str) -> None:
        """Use ``node_id`` again, as if nothing had failed on it."""
        self._blocked.pop(node_id, None)
        self._failures.pop(node_id, None)

    def as_json(self) -> dict[str, str]:
        """For the Journal."""
        return self.blocked

    @staticmethod
    def from_entries(entries: Iterable[Mapping[str, Any]]) -> dict[str, str]:
        """The blocked nodes of earlier drivers, from the fields of all Journal entries. The newest word counts, which
        is of all of them: a node that was lifted since is not blocked again."""
        blocked: dict[str, str] = {}
        for fields in entries:
            said = fields.get("blocked")
            if isinstance(said, dict):
                blocked = {str(node): str(reason) for node, reason in said.items()}
        return blocked


def _reason(recent: list[_Seen], config: FailureConfig) -> str:
    kinds = ", ".join(f"{count} {kind.value}" for kind, count in sorted(Counter(one.kind for one in recent).items()))
    return f"{len(recent)} worker failures within {config.node_failures_window_s:g} s ({kinds})"
