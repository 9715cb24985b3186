"""Saves and loads of plain torch programs, alone and at two and three ranks, without Ray.

Real: processes, gloo, DCP, codec, the local store and an S3 server over HTTP. All worlds are formed by the same
processes, one after the other.
"""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from storage import RaysumeReader, RaysumeWriter
from storage.commit_log import CommitLog
from storage.local_store import LocalStore
from storage.verify import verify_commit
from tests.integration import standalone_ranks as ranks

_TIMEOUT_S = 240.0
_PHASES = [
    *(("save_replicated", 2), ("load_replicated-2", 2), ("load_replicated-3", 3)),
    *(("save_sharded", 3), ("load_sharded-3", 3), ("load_sharded-2", 2), ("load_sharded-1", 1)),
    *(("fail", 2), ("async", 2)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("standalone")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integration.standalone_ranks"])  # torch is imported once
    processes = [context.Process(target=ranks.run, args=(rank, folder, _PHASES)) for rank in range(ranks.NUM_PROCESSES)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(_TIMEOUT_S)
        assert [process.exitcode for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    return folder


def reports(folder: Path, phase: str) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob(f"{phase}-[0-9].json"))]


def log_of(folder: Path, name: str) -> CommitLog:
    return CommitLog(LocalStore(folder / name), None)


def test_replicated_tensors_are_stored_once_and_shared_out(folder: Path) -> None:
    log = log_of(folder, "replicated")
    manifest = log.read_manifest(log.commits()[0])
    total = 4 * sum(ranks.REPLICAS.values())
    assert total < manifest.stored_bytes < 1.05 * total
    assert min(shard.size for shard in manifest.shards) > 0.35 * total


def test_a_value_of_each_rank_comes_back_to_its_rank(folder: Path) -> None:
    """B30."""
    loaded = reports(folder, "load_replicated-2")
    assert [report["pos"] for report in loaded] == [100, 101]
    assert [(report["lr"], report["ones"], report["refused"]) for report in loaded] == [(0.5, True, "")] * 2


def test_values_of_each_rank_are_not_dropped_in_silence_at_another_size(folder: Path) -> None:
    loaded = reports(folder, "load_replicated-3")
    for report in loaded:
        assert report["refused"].startswith("ManifestMismatch")
        assert "pos (one value for each of 2 ranks, 3 load)" in report["refused"]
        assert report["ones"]
    assert [report["pos"] for report in loaded] == [100, 101, -1]


@pytest.mark.parametrize("size", [3, 2, 1])
def test_sharded_tied_and_odd_tensors_are_equal_to_the_bit_at_every_size(folder: Path, size: int) -> None:
    saved = reports(folder, "save_sharded")[0]["digests"]
    assert len(saved) > 20
    loaded = reports(folder, f"load_sharded-{size}")
    assert [report["digests"] for report in loaded] == [saved] * size


def test_tied_tensors_are_stored_once(folder: Path) -> None:
    log = log_of(folder, "sharded")
    stored = log.read_manifest(log.commits()[0]).tensors
    assert "tensors.model.embedding.weight" in stored
    assert "tensors.model.head.weight" not in stored


def test_an_error_of_one_rank_is_told_to_all_and_nothing_is_committed(folder: Path) -> None:
    for report in reports(folder, "fail"):
        assert report["message"].startswith("NotPlainValue: rank 1 step 1: thing is a builtins.set")
        assert report["message"].endswith("on rank 1, while it was to save")
    assert [commit.step for commit in log_of(folder, "failed").commits()] == [2]


def test_async_saves_beside_training_collectives_finish_on_their_own_group(folder: Path) -> None:
    """B17, B19, B20: the load right after the last save waits for it on both ranks."""
    for report in reports(folder, "async"):
        own, training = report["groups"]
        assert own != training
        assert report["step"] == ranks.ASYNC_STEPS
        assert report["values"] == [ranks.ASYNC_STEPS]
    assert [commit.step for commit in log_of(folder, "async").commits()] == [ranks.ASYNC_STEPS - 1, ranks.ASYNC_STEPS]


@pytest.mark.parametrize("name", ["replicated", "sharded", "async"])
def test_what_was_saved_verifies(folder: Path, name: str) -> None:
    log = log_of(folder, name)
    assert all(verify_commit(log.store, log, commit).is_good for commit in log.commits())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_saves_to_and_loads_from_an_s3_server(bucket: str) -> None:
    url = f"s3://{bucket}/some/run"
    tensors = {"w": torch.randn(1000, 100)}
    dcp.save({"model": tensors, "step": 1}, storage_writer=RaysumeWriter(url, step=1, keep=1))
    dcp.async_save({"model": tensors, "step": 2}, storage_writer=RaysumeWriter(url, step=2, keep=1)).result(timeout=60)
    state = {"model": {"w": torch.zeros(1000, 100)}, "step": 0}
    reader = RaysumeReader(url)
    dcp.load(state, storage_reader=reader)
    assert (state["step"], reader.step) == (2, 2)
    assert torch.equal(state["model"]["w"], tensors["w"])
