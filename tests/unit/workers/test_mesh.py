"""How a World is cut into replicas of shards and what of it a configuration may ask for; ranks that failed to join.

Real in the last: two processes, gloo and its store.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch._C._distributed_c10d import HashStore, TCPStore

from workers.config import ModelConfig
from workers.mesh import fitting_shard_size, join_group, leave_group

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
    beside = torch.distributed.new_group(ranks=[0, 1])
    total = torch.tensor([rank + 1.0])
    torch.distributed.all_reduce(total, group=beside)
    torch.distributed.barrier()
    leave_group()
    results.put((total.item(), sys.excepthook is hook))


def test_ranks_that_failed_to_join_unequally_often_find_each_other() -> None:
    context = multiprocessing.get_context("spawn")
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
