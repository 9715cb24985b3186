"""How a World is cut into replicas of shards and what of it a configuration may ask for; what a failed join, or leave,
must not leave behind in a process.

Real where two ranks find each other: two processes, gloo and its store.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor, Shard, _random
from torch.testing._internal.distributed.fake_pg import FakeStore

from workers.config import ModelConfig
from workers.mesh import fitting_shard_size, join_group, leave_group, world_mesh

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("world_size", "shard_size", "expected"),
    [(4, 2, 2), (4, 3, 4), (4, 1, 1), (3, 2, 3), (6, 2, 2), (6, 4, 6), (9, 2, 3), (1, 8, 1), (2, 8, 2), (12, 5, 6)],
)
def test_no_rank_holds_more_than_it_was_meant_to(world_size: int, shard_size: int, expected: int) -> None:
    assert fitting_shard_size(world_size, shard_size) == expected


@pytest.mark.parametrize("given", [{"parallelism": "hsdp"}, {"shard_size": 2}, {"parallelism": "ddp", "shard_size": 2}])
def test_a_shard_size_and_hsdp_go_together(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"model\.shard_size goes with parallelism hsdp"):
        ModelConfig.model_validate(given)
    assert ModelConfig.model_validate({"parallelism": "hsdp", "shard_size": 2}).shard_size == 2


# -- joining after a join that failed ---------------------------------------------------------------------------------


def join_after_failures(rank: int, num_failures: int, port: int, results: Any) -> None:
    """Fail to join a World whose other rank never comes, then join one where it does, with a group beside it."""
    torch.set_num_threads(1)
    for _ in range(num_failures):
        with pytest.raises(RuntimeError):
            join_group(HashStore(), rank=rank, world_size=2, device=CPU, timeout_s=0.2)
    hook = sys.excepthook
    store = TCPStore("127.0.0.1", port, is_master=False)
    join_group(store, rank=rank, world_size=2, device=CPU, timeout_s=20.0)
    beside = dist.new_group(ranks=[0, 1])
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total, group=beside)
    dist.barrier()
    leave_group()
    results.put((total.item(), sys.excepthook is hook))


def test_ranks_that_failed_to_join_unequally_often_find_each_other() -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # torch is imported once, not by every rank
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = context.Queue()
    processes = [context.Process(target=join_after_failures, args=(r, 2 * r, store.port, results)) for r in range(2)]
    for process in processes:
        process.start()
    try:
        assert [results.get(timeout=90.0) for _ in processes] == [(3.0, True)] * 2
    finally:
        for process in processes:
            process.join(30.0)
            process.kill()


# -- nothing of it outlives an Attempt --------------------------------------------------------------------------------


def join_alone() -> None:
    join_group(HashStore(), rank=0, world_size=1, device=CPU, timeout_s=20.0)


def assert_world_of_one() -> None:
    """That the process can form a group, and one beside it, as if it were new."""
    join_alone()
    try:
        assert (dist.group.WORLD, dist.new_group()) != (None, None)
        assert sorted(distributed_c10d._world.pg_names.values()) == ["0", "1"]
    finally:
        leave_group()
    assert not dist.is_initialized()


def test_groups_that_could_not_be_destroyed_do_not_forbid_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: dist.ProcessGroup) -> None:
        raise RuntimeError("the communicator is broken")

    join_alone()
    dist.new_group()
    with monkeypatch.context() as patched:
        patched.setattr(dist.ProcessGroup, "shutdown", fail)
        with pytest.raises(RuntimeError, match="communicator is broken"):
            leave_group()
    assert not dist.is_initialized()
    assert_world_of_one()


def test_a_join_that_failed_behind_its_group_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    with monkeypatch.context() as patched:
        patched.setattr(distributed_c10d, "_store_based_barrier", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            join_alone()
    assert not dist.is_initialized()
    assert_world_of_one()


def test_a_group_that_an_earlier_attempt_left_open_does_not_forbid_the_next() -> None:
    join_alone()
    dist.new_group()
    assert_world_of_one()


def test_what_is_made_of_sharded_tensors_knows_the_rank_of_its_own_attempt() -> None:
    """As Attempts are: each in a thread of its own, in one process whose rank changes."""
    ranks = []

    def train(rank: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        weight = DTensor.from_local(torch.ones(3), world_mesh(CPU), [Shard(0)], run_check=False)
        for made in (torch.zeros_like(weight), weight * 2, weight.sum()):
            assert isinstance(made, DTensor)
            ranks.append(made.device_mesh.get_coordinate())
        leave_group()

    for rank in (0, 1, 0):
        thread = threading.Thread(target=train, args=(rank,))
        thread.start()
        thread.join(60.0)
    assert ranks == [(rank,) for rank in (0, 0, 0, 1, 1, 1, 0, 0, 0)]


def test_a_first_random_draw_of_sharded_tensors_is_the_first_again() -> None:
    """Making torch's tracker is a collective: a fresh process makes it, so one that trained before must as well."""
    join_alone()
    _random._rng_tracker = cast(Any, "made in this Attempt")
    leave_group()
    assert _random._rng_tracker is None
