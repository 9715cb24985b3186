"""The memory Tier of each World: what is said, what a rank is told, and how a World may part. The crew is a script."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.decisions import Stop
from orchestrator.exit_codes import ExitCode
from orchestrator.memory_setup import MemorySetup
from orchestrator.node_watcher import NodeView
from orchestrator.recorder import Recorder
from orchestrator.signals import StepFinished
from storage.config import MemoryConfig
from storage.keeper_protocol import KeeperGreeting, TransportAddress
from storage.keys import Attempt
from workers.contract import Member, OrderKind, StepReport

MIB = 1 << 20
LABEL = "ray.io/availability-zone"


class Crew:
    """Keepers of ``nodes``, each with ``budget``."""

    transport_key = bytes(range(32))

    def __init__(self, nodes: str, budget: int) -> None:
        self.errors: dict[str, str] = {}
        self.redirected: list[tuple[str, str, str, int]] = []
        self.living = {node: self._greeting(node, budget) for node in nodes}

    @staticmethod
    def _greeting(node: str, budget: int) -> KeeperGreeting:
        address = TransportAddress(node_id=node, host="127.0.0.1", port=ord(node))
        return KeeperGreeting(
            protocol_version=1, build_digest="", run_id="r", node_id=node, pid=1, address=address, budget_bytes=budget
        )

    def handles(self) -> dict[str, Any]:
        return dict.fromkeys(self.living)

    def greetings(self) -> dict[str, KeeperGreeting]:
        return self.living

    def memory_errors(self) -> dict[str, str]:
        return self.errors

    def redirect(self, node_id: str, lost: TransportAddress, address: TransportAddress) -> None:
        assert lost.port == ord(lost.node_id), "of the Keeper that ranks were told of"
        self.redirected.append((node_id, lost.node_id, address.node_id, address.port))


class Bench:
    def __init__(self, nodes: str = "abc", *, budget: int = 1000 * MIB, **config: Any) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.recorder = Recorder(self, start_unix_s=0.0)
        self.crew = Crew(nodes, budget)
        self.now_s = 0.0
        settings = MemoryConfig(**{"mode": "auto", **config})
        self.setup = MemorySetup(settings, self.crew, self.recorder, monotonic=lambda: self.now_s)
        self.nodes = {node: NodeView(node_id=node, is_alive=True, resources={}) for node in nodes}
        self.members = tuple(Member(rank=rank, worker_id=f"w{rank}", node_id=node) for rank, node in enumerate(nodes))

    def emit(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    def arrange(self, state_bytes: int | None = 30 * MIB, leaving: str = "") -> Stop | None:
        return self.setup.arrange(self.members, nodes=self.nodes, leaving=set(leaving), state_bytes=state_bytes)

    def finish_step(self, safe_step: int) -> None:
        report = StepReport(
            step=5, loss=1.0, grad_norm=1.0, lr=0.1, tokens=1, position=1, sample_chain="", step_s=0.1,
            finished_at_s=0.0, safe_step=safe_step,
        )  # fmt: skip
        self.recorder.record([StepFinished(attempt=Attempt(number=1, nonce="00000000"), report=report)])

    def peer(self, node: str) -> str | None:
        spec = self.setup.spec(node)
        assert spec is not None
        assert spec.key == Crew.transport_key
        return None if spec.peer is None else spec.peer.node_id


def test_each_rank_is_told_its_node_s_peer_and_it_is_said_once() -> None:
    bench = Bench()
    assert bench.arrange() is None
    assert [bench.peer(node) for node in "abc"] == ["b", "c", "a"]
    assert bench.arrange() is None
    [(name, fields)] = bench.events
    assert name == "memory_tier"
    assert (fields["mode"], fields["peers"]) == ("replicated", {"a": "b", "b": "c", "c": "a"})
    assert fields["need_bytes"] < fields["have_bytes"] == 1000 * MIB


def test_zones_are_read_from_the_node_s_labels() -> None:
    bench = Bench("abcd")
    for node, zone in zip("abcd", ["x", "x", "y", "y"], strict=True):
        bench.nodes[node] = NodeView(node_id=node, is_alive=True, resources={}, labels={LABEL: zone})
    bench.arrange()
    assert {bench.peer("a"), bench.peer("b")} == {"c", "d"}
    assert {bench.peer("c"), bench.peer("d")} == {"a", "b"}


def test_a_draining_node_and_one_that_is_gone_take_no_replicas() -> None:
    bench = Bench()
    bench.arrange(leaving="b")
    assert [bench.peer(node) for node in "abc"] == ["c", "a", "a"]
    del bench.nodes["b"]
    bench.members = bench.members[::2]
    bench.arrange()
    assert [bench.peer(node) for node in "ac"] == ["c", "a"]
    assert len(bench.events) == 2


def test_without_room_for_replicas_ranks_have_no_peer_and_it_is_said() -> None:
    bench = Bench(budget=40 * MIB)
    assert bench.arrange() is None
    assert [bench.peer(node) for node in "abc"] == [None, None, None]
    assert bench.events[-1][1]["mode"] == "own-only"


def test_without_any_room_ranks_keep_nothing_in_memory() -> None:
    bench = Bench(budget=10 * MIB)
    assert bench.arrange() is None
    assert bench.setup.spec("a") is None
    assert bench.events[-1][1]["mode"] == "off"


@pytest.mark.parametrize("budget", [10 * MIB, 40 * MIB])
def test_a_tier_that_is_insisted_on_and_does_not_fit_stops_the_run_before_training(budget: int) -> None:
    stop = Bench(mode="on", budget=budget).arrange()
    assert stop is not None
    assert stop.exit_code is ExitCode.CONFIG_ERROR
    assert "checkpoint.memory.mode is on, but" in stop.reason


def test_a_run_that_trains_is_not_ended_because_what_it_insists_on_has_no_room_any_more() -> None:
    """It has lost nodes; what it has trained since the last Checkpoint would be lost as well."""
    bench = Bench(mode="on", budget=100 * MIB)
    assert bench.arrange() is None
    bench.members = bench.members[:2]
    assert bench.arrange(state_bytes=60 * MIB) is None
    assert [fields["mode"] for _, fields in bench.events] == ["replicated", "own-only"]


def test_off_says_nothing_and_tells_nothing() -> None:
    bench = Bench(mode="off")
    assert bench.arrange() is None
    bench.crew.errors = {"a": "x"}
    bench.setup.note_errors()
    assert bench.setup.spec("a") is None
    assert bench.setup.leave_kind(bench.members, set()) is OrderKind.LEAVE
    assert bench.events == []


def test_a_world_parts_once_memory_has_been_seen_to_work() -> None:
    bench = Bench()
    bench.arrange()
    assert bench.setup.leave_kind(bench.members, set()) is OrderKind.LEAVE
    bench.finish_step(safe_step=4)
    assert bench.setup.leave_kind(bench.members, {"b"}) is OrderKind.PART
    del bench.crew.living["c"]
    assert bench.setup.leave_kind(bench.members, set()) is OrderKind.LEAVE


def test_without_replicas_a_node_that_goes_away_takes_its_snapshots_along() -> None:
    bench = Bench(replicate=False)
    bench.arrange()
    bench.finish_step(safe_step=4)
    assert bench.setup.leave_kind(bench.members, set()) is OrderKind.PART
    assert bench.setup.leave_kind(bench.members, {"b"}) is OrderKind.LEAVE


def test_a_world_does_not_part_from_a_node_whose_newest_snapshot_has_no_replica() -> None:
    bench = Bench()
    bench.arrange()
    bench.finish_step(safe_step=4)
    bench.crew.errors = {"b": "step 5: the peer was lost"}
    assert bench.setup.leave_kind(bench.members, {"b"}) is OrderKind.LEAVE
    assert bench.setup.leave_kind(bench.members, {"a"}) is OrderKind.PART, "what b keeps stays"
    assert bench.setup.leave_kind(bench.members, set()) is OrderKind.PART
    bench.crew.errors = {}
    assert bench.setup.leave_kind(bench.members, {"b"}) is OrderKind.PART


def test_what_keeps_a_keeper_from_replicating_is_said_once_it_lasts_and_once_for_each_change() -> None:
    bench = Bench()

    def look(errors: dict[str, str], after_s: float) -> None:
        bench.now_s += after_s
        bench.crew.errors = errors
        bench.setup.note_errors()

    look({"a": "step 5: the peer was lost"}, 0.0)
    look({}, 4.0)
    look({"a": "step 7: no route"}, 1.0)
    look({"a": "step 12: no route"}, 6.0)
    assert [fields["reason"] for _, fields in bench.events] == ["step 12: no route"]
    look({"a": "step 13: no route"}, 60.0)
    look({}, 1.0)
    look({"a": "no route"}, 1.0)
    look({"a": "no route"}, 5.0)
    said = [(name, fields["node"], fields["reason"]) for name, fields in bench.events]
    assert said == [("memory_degraded", "a", "step 12: no route"), ("memory_degraded", "a", "no route")]


def test_replicas_follow_a_keeper_to_its_successor_and_from_a_lost_node_to_another() -> None:
    bench = Bench()
    bench.arrange()
    assert [bench.peer(node) for node in "abc"] == ["b", "c", "a"]
    bench.setup.follow_keepers()
    assert bench.crew.redirected == []
    lost = bench.crew.living.pop("b")
    bench.setup.follow_keepers()
    bench.setup.follow_keepers()
    assert bench.crew.redirected == [("a", "b", "c", ord("c"))]
    successor = TransportAddress(node_id="c", host="127.0.0.1", port=7)
    bench.crew.living |= {"b": lost, "c": replace(bench.crew.living["c"], address=successor)}
    bench.setup.follow_keepers()
    assert bench.crew.redirected[1:] == [("a", "b", "c", 7), ("b", "c", "c", 7)]


def test_replicas_are_not_redirected_to_a_node_that_goes_away() -> None:
    bench = Bench("abcd")
    bench.arrange(leaving="c")
    assert [bench.peer(node) for node in "abcd"] == ["b", "d", "a", "a"]
    del bench.crew.living["b"]
    bench.setup.follow_keepers()
    assert bench.crew.redirected == [("a", "b", "d", ord("d"))]


def test_a_keeper_that_takes_another_s_place_is_told_again_where_replicas_go() -> None:
    """It knows nothing of what the one before it was told, and its ranks name the peer that is gone."""
    bench = Bench()
    bench.arrange()
    del bench.crew.living["b"]
    bench.setup.follow_keepers()
    own = bench.crew.living.pop("a")
    bench.setup.follow_keepers()
    bench.crew.redirected.clear()
    bench.crew.living["a"] = replace(own, address=TransportAddress(node_id="a", host="127.0.0.1", port=9))
    for _ in range(2):
        bench.setup.follow_keepers()
    assert ("a", "b", "c", ord("c")) in bench.crew.redirected
    assert len(bench.crew.redirected) == len(set(bench.crew.redirected)), "each once"


def test_a_peer_whose_keeper_dies_just_before_the_world_begins_is_no_reason_to_go_without() -> None:
    """Ranks without a peer take their own Snapshots for safe."""
    bench = Bench()
    bench.arrange()
    del bench.crew.living["b"]
    assert bench.peer("a") == "b"
    bench.setup.follow_keepers()
    assert bench.crew.redirected == [("a", "b", "c", ord("c"))]


def test_a_keeper_that_has_just_died_neither_ends_the_run_nor_the_memory_tier() -> None:
    bench = Bench(mode="on")
    assert bench.arrange() is None
    del bench.crew.living["b"]
    assert bench.arrange() is None
    assert [bench.peer(node) for node in "abc"] == ["c", "a", "a"]
