"""One Attempt, watched: a World that breaks before it begins. Workers are on paper, Ray is not asked."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.attempt_run import AttemptRun, Broken
from orchestrator.config import RunConfig, RunSettings, WorldConfig
from orchestrator.failure_policy import FaultKind
from orchestrator.recorder import Recorder
from orchestrator.sizing import Sizing
from orchestrator.slow_node_watch import SlowNodeWatch
from storage.keys import Attempt
from tests.fakes.worker_groups import PaperCluster
from workers.config import DataConfig, ModelConfig
from workers.contract import AttemptSpec, Member, OrderKind, World


class _Coordinator:
    actor = None


def test_a_member_that_is_lost_while_the_world_is_prepared_breaks_it_and_not_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its node is let go by the books that are kept while the restore is planned."""
    cluster = PaperCluster(monkeypatch, {"a": 1.0})
    group = cluster.group
    group.admit("a", 1)
    group.reconcile(1, frozenset())
    (worker,) = group.views(frozenset())
    world = World(
        attempt=Attempt(number=3, nonce="abcd1234"),
        members=(Member(rank=0, worker_id=worker.worker_id, node_id="a"),),
    )
    group.forget_node("a")
    events: list[tuple[str, dict[str, Any]]] = []

    class Sink:
        def emit(self, event: str, **fields: Any) -> None:
            events.append((event, fields))

    config = RunConfig(
        run=RunSettings(name="r", url="memory://r", steps=100),
        world=WorldConfig(),
        model=ModelConfig(),
        data=DataConfig(url="memory://d", sequence_length=8, global_batch=8),
    )
    recorder = Recorder(Sink(), start_unix_s=0.0)
    sizing = Sizing(config, recorder)
    run = AttemptRun(
        world=world,
        group=group,
        coordinator=_Coordinator(),  # type: ignore[arg-type]
        config=config,
        sizing=sizing,
        slow_nodes=SlowNodeWatch(config, recorder, sizing.pace),
        recorder=recorder,
        tick=lambda: None,
        draining=frozenset,
        living=lambda: frozenset({"b"}),
        asked_to_stop=lambda: None,
        is_store_away=lambda: False,
        part_kind=lambda: OrderKind.LEAVE,
        move=lambda _: None,
    )
    spec = AttemptSpec(run_id="r", world=world, rank=0, store_host="h", store_port=1, group_timeout_s=1.0, restore=None)
    end = run.run({worker.worker_id: spec})
    assert isinstance(end, Broken)
    assert (end.fault.kind, end.facts.lost_nodes) == (FaultKind.NODE_LOST, ("a",))
    assert [name for name, _ in events] == ["fault", "attempt_ended"]
    group.lifelines.close()
