"""Nodes that were judged lost, and when one may be used again. Pure; time is an argument.

The judgement is made within moments and may be wrong: a node that only the network hid is still in Ray's list later on.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["AWAY_S", "LONGEST_AWAY_S", "LostNodes"]

AWAY_S = 30.0  # Ray itself takes half a minute to notice a silent machine; doubled at each further loss
LONGEST_AWAY_S = 960.0


@dataclass(slots=True, kw_only=True)
class _Loss:
    at_s: float
    count: int
    is_away: bool = True

    @property
    def until_s(self) -> float:
        return self.at_s + min(LONGEST_AWAY_S, AWAY_S * 2.0 ** (self.count - 1))


class LostNodes:
    """Node ids of one driver's time."""

    def __init__(self) -> None:
        self._losses: dict[str, _Loss] = {}

    @property
    def away(self) -> frozenset[str]:
        """Not to be used at present, whatever Ray's list says of them."""
        return frozenset(node_id for node_id, loss in self._losses.items() if loss.is_away)

    def lose(self, node_id: str, now_s: float) -> None:
        before = self._losses.get(node_id)
        self._losses[node_id] = _Loss(at_s=now_s, count=1 if before is None else before.count + 1)

    def take_back(self, now_s: float, listed: Collection[str]) -> tuple[str, ...]:
        """The nodes that Ray still lists as alive (``listed``) after their time away: from now on they may be used."""
        back = [n for n, loss in self._losses.items() if loss.is_away and n in listed and now_s >= loss.until_s]
        for node_id in back:
            self._losses[node_id].is_away = False
        return tuple(back)
