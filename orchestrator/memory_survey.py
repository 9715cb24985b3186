"""Asks the Keepers, all at once and never for long, what they hold in memory. A Keeper that is silent is left out.

What is made of the answers is storage.memory_plan's and plan_chooser's business.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from storage.errors import StorageError
from storage.keeper_protocol import MemoryReport
from storage.keys import StepKey
from storage.manifest import Receipt

__all__ = ["Answers", "KeeperSurvey", "MemorySurvey", "adopt_keepers"]

_log = logging.getLogger(__name__)
REPORT_S = 3.0  # a Keeper waits itself for what it is just indexing
RECEIPTS_S = 2.0
ADOPT_S = 5.0
_HURRY_S = 0.25  # once what was hoped for is there, others are waited for no longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """``silent``: nodes whose Keepers did not answer in time, and may the next time."""

    reports: tuple[MemoryReport, ...]
    silent: frozenset[str] = frozenset()


class MemorySurvey(Protocol):
    """What is asked of the Keepers of ``nodes``."""

    def reports(self, nodes: Collection[str], is_enough: Callable[[Sequence[MemoryReport]], bool]) -> Answers: ...

    def receipts(self, nodes: Collection[str], key: StepKey) -> dict[str, tuple[Receipt, ...]]: ...


class KeeperSurvey:
    """By Ray, of the Keepers that ``handles`` names."""

    def __init__(self, handles: Callable[[], Mapping[str, Any]]) -> None:
        self._handles = handles

    def reports(self, nodes: Collection[str], is_enough: Callable[[Sequence[MemoryReport]], bool]) -> Answers:
        """All that answer within `REPORT_S`; fewer where those that did are ``is_enough``."""
        calls = {keeper.memory_report.remote(): node for node, keeper in self._handles().items() if node in nodes}
        began, found = time.monotonic(), list[MemoryReport]()
        while calls:
            spent_s = time.monotonic() - began
            is_hurried = spent_s >= _HURRY_S and is_enough(found)
            left_s = 0.0 if is_hurried else max(0.0, (_HURRY_S if spent_s < _HURRY_S else REPORT_S) - spent_s)
            found += [report for _, report in _taken(calls, left_s)]
            if is_hurried or time.monotonic() - began >= REPORT_S:
                break
        for node in calls.values():
            _log.info("the Keeper of node %s does not tell what it holds in memory", node[:12])
        return Answers(reports=tuple(found), silent=frozenset(calls.values()))

    def receipts(self, nodes: Collection[str], key: StepKey) -> dict[str, tuple[Receipt, ...]]:
        """By node, of every generation of ``key`` that its Keeper holds."""
        calls = {
            keeper.generation_receipts.remote(key.attempt, key.step): node
            for node, keeper in self._handles().items()
            if node in nodes
        }
        until, found = time.monotonic() + RECEIPTS_S, dict[str, tuple[Receipt, ...]]()
        while calls and time.monotonic() < until:
            found.update(_taken(calls, until - time.monotonic()))
        return found


def adopt_keepers(start: Callable[[str], Any], nodes: Iterable[str], timeout_s: float = ADOPT_S) -> None:
    """Make the Keepers of ``nodes``, which another driver left, listen to this one; who takes longer is left out."""

    def adopt(node: str) -> None:
        try:
            start(node)
        except (StorageError, ray.exceptions.RayError) as error:
            _log.info("node %s: what its Keeper holds cannot be asked: %s", node[:12], error)

    threads = [threading.Thread(target=adopt, args=(node,), name="keeper-adoption", daemon=True) for node in nodes]
    until = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def _taken(calls: dict[Any, str], timeout_s: float) -> list[tuple[str, Any]]:
    """Wait for one answer, then take all that are there; what was asked in vain is forgotten."""
    ready, _ = ray.wait(list(calls), num_returns=1, timeout=timeout_s)
    more, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
    answers = []
    for ref in {*ready, *more}:
        node = calls.pop(ref)
        try:
            answers.append((node, ray.get(ref)))
        except ray.exceptions.RayError as error:
            _log.info("the Keeper of node %s was asked in vain: %s", node[:12], type(error).__name__)
    return answers
