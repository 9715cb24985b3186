"""Keepers that another driver left are adopted side by side; one that cannot be, or hangs, is left out."""

from __future__ import annotations

import threading

from orchestrator.memory_survey import adopt_keepers
from storage.errors import KeeperRefused


def test_a_keeper_that_refuses_or_hangs_keeps_nobody_from_going_on() -> None:
    never = threading.Event()
    adopted: list[str] = []

    def start(node: str) -> None:
        if node == "refuses":
            raise KeeperRefused(node, "no disk")
        if node == "hangs":
            never.wait(20.0)
        adopted.append(node)

    adopt_keepers(start, ["hangs", "refuses", "a", "b"], timeout_s=1.0)
    assert sorted(adopted) == ["a", "b"]
    never.set()
