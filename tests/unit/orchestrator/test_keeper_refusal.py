"""A node whose Keeper refuses to be made, as the worker group sees it. No cluster: the making of a node is replaced."""

from __future__ import annotations

import time
from typing import Any

import pytest

from orchestrator.lifelines import Lifelines
from orchestrator.worker_group import MAX_STARTS_PER_NODE, WorkerGroup, WorkerLost
from storage.errors import KeeperRefused, StorageError

NODE = "a" * 56


def unused(*_: object, **__: object) -> Any:
    raise AssertionError("nothing is spawned here")


def group_where_nodes_fail(monkeypatch: pytest.MonkeyPatch, error: Exception) -> WorkerGroup:
    group = WorkerGroup(
        run_id="r",
        spawn=unused,
        start_keeper=unused,
        resources_per_worker={"CPU": 1.0},
        lifelines=Lifelines("127.0.0.1"),
    )

    def build(*_: object) -> None:
        raise error

    monkeypatch.setattr(group, "_build_node", build)
    return group


def lost_at_admission(group: WorkerGroup) -> tuple[WorkerLost, ...]:
    group.admit(NODE, 1)
    until = time.monotonic() + 10.0
    while not (lost := group.reconcile(1, frozenset())):
        assert time.monotonic() < until
    return lost


def test_a_keeper_that_refuses_again_and_again_is_a_reason_why_no_worker_can_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = group_where_nodes_fail(monkeypatch, KeeperRefused(NODE, "the local-disk Tier cannot be used: no space"))
    for _ in range(MAX_STARTS_PER_NODE):
        assert (group.refusal(), NODE in group.known_nodes()) == (None, False), "another try may go well"
        lost_at_admission(group)
    refusal = group.refusal()
    assert refusal is not None
    assert "local-disk Tier cannot be used: no space" in refusal.reason
    assert NODE in group.known_nodes(), "it would be admitted for ever"
    group.forget_node(NODE)
    assert (group.refusal(), NODE in group.known_nodes()) == (None, False)


def test_a_keeper_that_is_only_late_is_tried_on_and_on(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_where_nodes_fail(monkeypatch, StorageError("its Keeper did not start within 60 s"))
    for _ in range(2 * MAX_STARTS_PER_NODE):
        (lost,) = lost_at_admission(group)
        assert not lost.is_refusal
    assert (group.refusal(), NODE in group.known_nodes()) == (None, False)
