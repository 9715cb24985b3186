"""A save in the cheaper form, though the configuration asks for the exact one. Real: Keeper, spool-less, and store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from storage.buffer_map import map_buffer
from storage.config import CheckpointConfig, LevelRule
from storage.frames import read_index
from storage.keeper import Keeper
from storage.manifest import Receipt
from storage.memory_store import MemoryStore
from tests.fakes.memory_bench import FIRST, WAIT_S, MemoryBench, ask
from tests.fakes.recording_sink import RecordingSink
from tests.fakes.snapshot_writer import fill, make_header, sealed

BOUND = 2e-3
NAMES = ("optim.w.exp_avg", "optim.w.exp_avg_sq")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[MemoryBench]:
    bench = MemoryBench(tmp_path)
    yield bench
    bench.close()


def config(*rules: LevelRule) -> CheckpointConfig:
    return CheckpointConfig(encoding="raw", moment_bound=BOUND, levels=rules)


def save(keeper: Keeper, sink: RecordingSink, *, step: int, bounded: bool, keep: bool = False) -> Receipt:
    random = np.random.default_rng(step)
    arrays = {
        "model.w": random.normal(size=(64, 64)).astype(np.float32),
        NAMES[0]: random.normal(size=(64, 64)).astype(np.float32),
        NAMES[1]: np.square(random.normal(size=(64, 64))).astype(np.float32),
        "optim.w.step": np.ones((1,), np.float32),
    }
    header, num_bytes = make_header(arrays, attempt=FIRST, step=step, world_size=1)
    chunks = tuple(replace(one, level="L2" if one.name in NAMES else "L1") for one in header.chunks)
    header = replace(header, chunks=chunks)
    lease = ask(keeper, num_bytes, step=step)
    assert lease is not None
    with map_buffer(lease.path, lease.num_bytes) as buffer:
        digest = fill(buffer, header, arrays)
    keeper.seal(replace(sealed(header, lease, digest), bounded=bounded, keep=keep))
    assert keeper.flush(WAIT_S)
    return sink.receipts[-1]


def rounded(store: MemoryStore, receipt: Receipt) -> dict[str, float]:
    """The verified error of the next update, of each tensor that the stored Shard says is rounded."""
    index = read_index(partial(store.get_range, receipt.shard.key), receipt.shard, step=receipt.step)
    found = {one.name: one.update_error for one in index.chunks if one.bound is not None}
    assert set(found) == {name for name, layout in receipt.tensors.items() if layout.bound == BOUND}
    return {name: error for name, error in found.items() if error is not None}


@pytest.mark.parametrize("keep", [False, True])
def test_one_save_is_rounded_within_the_bound_and_the_next_is_exact_again(bench: MemoryBench, keep: bool) -> None:
    store, sink = MemoryStore(), RecordingSink()
    keeper = bench.keeper("a", store=store, sink=sink, config=config())
    errors = rounded(store, save(keeper, sink, step=1, bounded=True, keep=keep))
    assert set(errors) == set(NAMES)
    assert all(0 < error <= BOUND for error in errors.values())
    assert rounded(store, save(keeper, sink, step=2, bounded=False, keep=keep)) == {}


def test_what_a_rule_calls_lossless_stays_so(bench: MemoryBench) -> None:
    store, sink = MemoryStore(), RecordingSink()
    rule = LevelRule(pattern="optim.*.exp_avg_sq", fidelity="lossless")
    keeper = bench.keeper("a", store=store, sink=sink, config=config(rule))
    assert set(rounded(store, save(keeper, sink, step=1, bounded=True))) == {NAMES[0]}
