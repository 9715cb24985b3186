"""Tensors are filled from generations in memory; real: raw Shards, files, and the transport's servers on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from storage.dcp_calls import load_tensors
from storage.dcp_reader import ManifestReader
from storage.errors import MemoryUnreadable
from storage.keeper_protocol import (
    BufferLease,
    GenerationFacts,
    MemoryReport,
    SealedSnapshot,
    TransportAddress,
)
from storage.keys import Attempt, StepKey
from storage.manifest import Receipt
from storage.memory_plan import ChosenGeneration, build_plan, choose_generation
from storage.memory_shard import index_snapshot, read_receipt
from storage.memory_source import MemoryReach, MemoryShardSource
from storage.restore import read_manifest
from storage.sources import MemorySource, RestorePlan, ShardLocation
from storage.transport import ReplicaRef
from storage.transport_server import TransportServer
from tests.fakes.replica_holder import FakeHolder
from tests.fakes.snapshot_writer import fill, make_header, sealed

ATTEMPT = Attempt(number=1, nonce="0badcafe")
KEY = bytes(range(32))
STEP, WORLD, ROWS = 7, 2, 700


def raw_shard(rank: int) -> tuple[bytes, Receipt]:
    """The whole object that a Keeper holds for ``rank``, and its Receipt."""
    random = np.random.default_rng([STEP, rank])
    arrays = {
        "bias": np.full((3,), rank, np.float32),
        "weight": random.normal(size=(ROWS, 1024)).astype(np.float32),
    }
    header, num_bytes = make_header(arrays, attempt=ATTEMPT, step=STEP, rank=rank, world_size=WORLD)
    buffer = bytearray(num_bytes)
    digest = fill(buffer, header, arrays)
    lease = BufferLease(lease_id="x", path="x", num_bytes=num_bytes)
    snapshot: SealedSnapshot = sealed(header, lease, digest)
    shard = index_snapshot(snapshot, memoryview(buffer))
    content = bytes(buffer) + shard.tail
    ref = ReplicaRef(
        run_id=header.run_id,
        attempt=ATTEMPT,
        step=STEP,
        rank=rank,
        world_size=WORLD,
        num_bytes=len(content),
        digest=shard.digest,
    )
    return content, read_receipt(ref, memoryview(content))


@dataclass
class Cluster:
    """Nodes n0 and n1, each with its own rank's file and the other's replica."""

    folder: Path
    servers: list[TransportServer] = field(default_factory=list)
    holders: list[FakeHolder] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)

    def __post_init__(self) -> None:
        shards = [raw_shard(rank) for rank in range(WORLD)]
        self.receipts = [receipt for _, receipt in shards]
        for node in range(WORLD):
            holder = FakeHolder()
            for rank, (content, _) in enumerate(shards):
                self.path(node, rank).write_bytes(content)
                holder.sealed[ATTEMPT, STEP, rank] = content
            self.holders.append(holder)
            self.servers.append(TransportServer(holder, run_id="run", node_id=f"n{node}", host="127.0.0.1", key=KEY))

    def path(self, node: int, rank: int) -> Path:
        return self.folder / f"n{node}-{rank}"

    def plan(self, nodes: tuple[int, ...] = (0, 1)) -> RestorePlan:
        """From what Keepers of ``nodes`` hold."""
        reports = [
            MemoryReport(
                address=self.servers[node].address,
                generations=tuple(
                    GenerationFacts(
                        attempt=ATTEMPT,
                        step=STEP,
                        rank=rank,
                        world_size=WORLD,
                        num_bytes=self.receipts[rank].shard.size,
                        path=str(self.path(node, rank)),
                        is_replica=rank != node,
                    )
                    for rank in range(WORLD)
                ),
            )
            for node in nodes
        ]
        chosen = choose_generation(reports, lineage={ATTEMPT: 0})
        assert isinstance(chosen, ChosenGeneration)
        return build_plan(
            chosen,
            {f"n{node}": self.receipts for node in nodes},
            attempt=Attempt(number=2, nonce="0badcafe"),
            member_nodes=["n0", "n1"],
            root_url="memory://",
            time_utc="2026-01-01T00:00:00.000Z",
            metadata={},
            key=KEY,
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    for server in made.servers:
        server.close()


def load(plan: RestorePlan, node_id: str, rows: slice = slice(None)) -> tuple[torch.Tensor, MemoryShardSource]:
    """All of ``weight`` as a rank on ``node_id`` reads it, and the source that it was read from."""
    assert plan.memory is not None
    manifest = read_manifest(plan, None)
    weight = torch.zeros(WORLD * ROWS, 1024)
    reach = MemoryReach(node_id=node_id, run_id="run", key=KEY, deadline_s=5.0)
    with MemoryShardSource(plan.memory, plan.source, reach) as source:
        reader = ManifestReader(manifest, plan.shards, source)
        tensors = {"weight": weight, "bias": torch.zeros(3 * WORLD)}
        load_tensors(tensors, reader, DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
    assert tensors["bias"].tolist() == [0, 0, 0, 1, 1, 1]
    return weight[rows], source


def expected() -> torch.Tensor:
    parts = [np.random.default_rng([STEP, rank]).normal(size=(ROWS, 1024)).astype(np.float32) for rank in range(WORLD)]
    return torch.from_numpy(np.concatenate(parts))


def spoil(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_a_rank_finds_all_on_its_own_node_and_tells_own_from_replica(cluster: Cluster) -> None:
    weight, source = load(cluster.plan(), "n0")
    assert torch.equal(weight, expected())
    size = 4 * ROWS * 1024
    own, peer = source.bytes_by_tier["own-memory"], source.bytes_by_tier["peer-memory"]
    assert size < own < 1.1 * size
    assert size < peer < 1.1 * size


def test_what_lies_on_another_node_comes_over_the_transport(cluster: Cluster) -> None:
    weight, source = load(cluster.plan(nodes=(1,)), "n0")
    assert torch.equal(weight, expected())
    assert source.bytes_by_tier["own-memory"] == 0
    assert source.bytes_by_tier["peer-memory"] > 2 * 4 * ROWS * 1024


def test_a_file_without_the_end_of_the_object_is_read_through_its_keeper(cluster: Cluster) -> None:
    """A Keeper keeps the index elsewhere where the buffer has no room for it."""
    record = cluster.receipts[0].shard
    path = cluster.path(0, 0)
    path.write_bytes(path.read_bytes()[: record.size - record.index_bytes - 24])
    weight, source = load(cluster.plan(nodes=(0,)), "n0")
    assert torch.equal(weight, expected())
    assert source.bytes_by_tier["own-memory"] > 4 * ROWS * 1024


def test_a_dead_peer_is_stood_in_for_by_the_next_holder(cluster: Cluster) -> None:
    plan = cluster.plan()
    cluster.servers[0].close()
    weight, _ = load(plan, "elsewhere")
    assert torch.equal(weight, expected())


def test_a_holder_that_dropped_it_is_stood_in_for_by_the_next(cluster: Cluster) -> None:
    plan = cluster.plan()
    cluster.holders[0].sealed.clear()
    weight, _ = load(plan, "elsewhere")
    assert torch.equal(weight, expected())


@pytest.mark.parametrize("where", ["frame", "index"])
def test_a_flipped_bit_is_read_from_another_holder(cluster: Cluster, where: str) -> None:
    plan = cluster.plan()
    record = cluster.receipts[0].shard
    spoil(cluster.path(0, 0), record.size - 100 if where == "index" else record.size // 2)
    weight, _ = load(plan, "n0")
    assert torch.equal(weight, expected())


@pytest.mark.parametrize("where", ["frame", "index"])
def test_bits_flipped_at_every_holder_make_the_generation_unreadable_and_no_checkpoint_corrupt(
    cluster: Cluster, where: str
) -> None:
    plan = cluster.plan()
    record = cluster.receipts[1].shard
    offset = record.size - 100 if where == "index" else record.size // 2
    for node in range(WORLD):
        spoil(cluster.path(node, 1), offset)
        content = bytearray(cluster.holders[node].sealed[ATTEMPT, STEP, 1])
        content[offset] ^= 1
        cluster.holders[node].sealed[ATTEMPT, STEP, 1] = bytes(content)
    with pytest.raises(MemoryUnreadable, match=r"step 7 in memory: the Snapshot of rank 1 .*hash mismatch") as caught:
        load(plan, "n0")
    assert (caught.value.step, caught.value.rank) == (7, 1)


def test_when_nobody_has_it_any_more_every_place_is_named(cluster: Cluster) -> None:
    plan = cluster.plan()
    cluster.path(0, 1).unlink()
    for holder in cluster.holders:
        holder.sealed.clear()
    with pytest.raises(MemoryUnreadable, match=r"this node's .*n0-1 and this node's Keeper .* and node n1"):
        load(plan, "n0")


def test_a_wrong_key_opens_nothing(cluster: Cluster) -> None:
    plan = cluster.plan()
    assert plan.memory is not None
    reach = MemoryReach(node_id="elsewhere", run_id="run", key=bytes(32), deadline_s=5.0)
    with MemoryShardSource(plan.memory, plan.source, reach) as source, pytest.raises(MemoryUnreadable):
        source.read_range(plan.shards[0], 0, 10)
    assert "key" not in repr(reach)


def test_a_manifest_that_is_not_the_plan_s_is_refused(cluster: Cluster) -> None:
    plan = cluster.plan()
    assert plan.memory is not None
    other = replace(plan, memory=replace(plan.memory, manifest=plan.memory.manifest + b" "))
    with pytest.raises(MemoryUnreadable, match="hash mismatch"):
        read_manifest(other, None)


def test_a_rank_that_the_plan_does_not_place_is_unreadable() -> None:
    address = TransportAddress(node_id="n0", host="127.0.0.1", port=1)
    reach = MemoryReach(node_id=address.node_id, run_id="run", key=KEY)
    place = ShardLocation(rank=3, tier="peer-memory", location="-")
    with (
        MemoryShardSource(MemorySource(manifest=b"", places=()), StepKey(step=1, attempt=ATTEMPT), reach) as source,
        pytest.raises(MemoryUnreadable, match="names no place"),
    ):
        source.read_range(place, 0, 1)
