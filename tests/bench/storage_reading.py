"""The figures of reading: bytes read by a reshard, what digests cost, and what a corrupt Checkpoint costs.

World sizes are planned as DCP plans them, all ranks in one process; the peer is DCP's own reader on its own files.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from storage import RaysumeReader, RaysumeWriter
from storage.commit_log import CommitLog
from storage.dcp_standalone import load, own_errors
from storage.local_store import LocalStore
from tests.bench.figures import Figure
from tests.fakes.virtual_ranks import load_as, save_as

__all__ = ["corruption", "resharding"]

SAVED_BY = 4
LIMIT = 1.10
Tensors = dict[str, torch.Tensor]


class CountingReader(FileSystemReader):
    """DCP's reader, which counts the bytes of what it reads: it takes each stored item whole."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.bytes_read = 0

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self.bytes_read += sum(self.storage_data[item.storage_index].length for item in plan.items)
        return super().read_data(plan, planner)


def synthetic_state(gigabytes: float) -> Tensors:
    """Square fp32 tensors of 16 MiB, so 4 MiB for each of four ranks."""
    generator = torch.Generator().manual_seed(2)
    count = max(1, round(gigabytes * 1e9 / (1 << 24)))
    return {f"layer.{number:03}": torch.randn(2048, 2048, generator=generator) for number in range(count)}


def resharding(scratch: Path, gigabytes: float) -> list[Figure]:
    """4 to 3 and 4 to 5 ranks: bytes read over the Checkpoint's size, ours and DCP's; then the digests' share."""
    state = synthetic_state(gigabytes)
    save_as([RaysumeWriter(scratch / "ours", step=1) for _ in range(SAVED_BY)], state)
    filled = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    figures = []
    ours: dict[int, float] = {}
    for size in (3, 5):
        readers = [RaysumeReader(scratch / "ours") for _ in range(size)]
        load_as(readers, filled)
        _require_equal(filled, state)
        ours[size] = sum(reader.bytes_read for reader in readers) / readers[0].manifest.stored_bytes
    figures.append(_digest_share(scratch / "ours", filled))
    shutil.rmtree(scratch / "ours")
    peer = _stock(scratch / "stock", state, filled)
    for size in (3, 5):
        figures.append(
            Figure(
                name=f"bytes read over Checkpoint size, {SAVED_BY} to {size} ranks, {gigabytes:g} GB",
                ours=f"{ours[size]:.3f}",
                peer=f"{peer[size]:.3f}",
                ratio=ours[size],
                limit=LIMIT,
            )
        )
    return figures


def _stock(path: Path, state: Tensors, filled: Tensors) -> dict[int, float]:
    save_as([FileSystemWriter(path) for _ in range(SAVED_BY)], state)
    total = sum(file.stat().st_size for file in path.rglob("*.distcp"))
    found = {}
    for size in (3, 5):
        readers = [CountingReader(path) for _ in range(size)]
        load_as(readers, filled)
        _require_equal(filled, state)
        found[size] = sum(reader.bytes_read for reader in readers) / total
    shutil.rmtree(path)
    return found


def _digest_share(url: Path, filled: Tensors) -> Figure:
    """Restore of the whole state by one rank with one thread, against digesting the same stored bytes alone."""
    reader = RaysumeReader(url, num_threads=1)
    started = time.perf_counter()
    with own_errors("load"):
        dcp.load(dict(filled), storage_reader=reader)
    restore_s = time.perf_counter() - started
    digest_s = 0.0
    for shard in url.rglob("*.shard"):
        content = memoryview(shard.read_bytes())
        started = time.perf_counter()
        for start in range(0, len(content), 256 << 10):
            xxhash.xxh3_64_hexdigest(content[start : start + (256 << 10)])
        digest_s += time.perf_counter() - started
    return Figure(
        name="digest checks over a restore",
        ours=f"{digest_s:.2f} s",
        peer=f"{restore_s:.2f} s",
        ratio=digest_s / restore_s,
        limit=0.10,
    )


def _require_equal(filled: Tensors, state: Tensors) -> None:
    for name, tensor in state.items():
        if not torch.equal(filled[name], tensor):
            raise SystemExit(f"{name} came back with other values")
        filled[name].zero_()


def corruption(scratch: Path) -> list[Figure]:
    """One bit of the newest Checkpoint is flipped. Extra reads: Shards that a clean load would not have opened."""
    ours, values = scratch / "flipped", torch.randn(1 << 20)
    for step in (1, 2):
        with own_errors("save"):
            dcp.save({"w": values * step}, storage_writer=RaysumeWriter(ours, step=step))
    _flip(sorted((ours / "shards").glob("step-0000000002/*/*.shard")))
    opened: list[str] = []
    state = {"w": torch.zeros(1 << 20)}
    real = LocalStore.get_range

    def counted(store: LocalStore, key: str, offset: int, length: int, **options: Any) -> bytes:
        opened.append(key)
        return real(store, key, offset, length, **options)

    LocalStore.get_range = counted  # type: ignore[method-assign]
    try:
        step = load(state, RaysumeReader(ours))
    finally:
        LocalStore.get_range = real  # type: ignore[method-assign]
    reason = next(iter(CommitLog(LocalStore(ours), None).quarantined().values()))
    if step != 1 or not torch.equal(state["w"], values) or not reason.key.endswith("rank-00000.shard"):
        raise SystemExit(f"step {step} was loaded, {reason.key} named")
    peer = scratch / "stock-flipped"
    dcp.save({"w": values}, checkpoint_id=peer)
    _flip(sorted(peer.glob("*.distcp")))
    told = "wrong numbers, silently"
    try:
        dcp.load(wrong := {"w": torch.zeros(1 << 20)}, checkpoint_id=peer)
        told = "right numbers" if torch.equal(wrong["w"], values) else told
    except BaseException as error:  # noqa: BLE001  DCP's own error is one
        told = type(error).__name__
    return [
        Figure(
            name="extra Shards read when the newest Checkpoint is corrupt",
            ours=f"{len(set(opened)) - 1} (step 1, names the file)",
            peer=told,
            ratio=len(set(opened)) - 1,
            limit=1,
        )
    ]


def _flip(files: Sequence[Path]) -> None:
    content = bytearray(files[0].read_bytes())
    content[len(content) // 2] ^= 1
    files[0].write_bytes(bytes(content))
