"""The figures of saving: how long training stands still, how many bytes are stored, how fast they get there.

Every peer runs in the same process on the same tensors; the plain copy alternates with ours.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from storage.config import CheckpointConfig
from storage.keeper import Keeper
from storage.keys import Attempt
from storage.open_store import open_store
from storage.shard_writer import RawChunk, encode_shard
from tests.bench import bench_codec
from tests.bench.figures import Figure
from tests.bench.s3_server import swift_bucket
from tests.bench.small_lm import trained_arrays
from tests.fakes.recording_sink import RecordingSink
from tests.servers import PacedProxy
from workers.snapshot import Capture
from workers.staging import Stager

__all__ = ["stored_bytes", "throughput", "training_stall"]

RUN = "bench"
ATTEMPT = Attempt(number=1, nonce="0badcafe")
FLUSH_S = 300.0
LINK_ZSTD_LEVEL = 9  # slow: the codec at its usual level leaves such a link far behind
Tensors = dict[str, torch.Tensor]


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextlib.contextmanager
def stager_into(url: str, scratch: Path, config: CheckpointConfig) -> Iterator[tuple[Stager, Keeper]]:
    """A Stager with a Keeper in this process, its arena in shared memory."""
    arena = Path("/dev/shm") / f"raysume-bench-{os.getpid()}-{scratch.name}"
    keeper = Keeper(RUN, "node", open_store(url), RecordingSink(), config, arena)
    stager = Stager(keeper, RUN, os.getpid())
    try:
        yield stager, keeper
    finally:
        stager.close()
        keeper.close()
        shutil.rmtree(arena, ignore_errors=True)


def training_stall(scratch: Path, rounds: int) -> list[Figure]:
    """About 210 MB: a plain copy into memory that is there already, our snapshot, and torch's ways of saving."""
    tensors: Tensors = {f"model.layer.{number}": torch.randn(1310720) for number in range(40)}
    copies = [torch.zeros_like(tensor) for tensor in tensors.values()]
    captured = Capture(tensors=tensors, shared_state={}, rank_state={})
    cached = DefaultStager(StagingOptions(False, False, False, False))
    async_ways: dict[str, dict[str, Any]] = {"async": {}, "async, cached": {"async_stager": cached}}
    seconds: dict[str, list[float]] = {"memcpy": [], "ours": [], "async": [], "async, cached": [], "fsync": []}
    with stager_into(str(scratch / "ours"), scratch, CheckpointConfig(encoding="raw")) as (stager, keeper):
        for step in range(2 * rounds + 2):
            # No encoding runs beside a measurement: what it costs training is another figure.
            seconds["memcpy"].append(timed(lambda: [a.copy_(b) for a, b in zip(copies, tensors.values(), strict=True)]))
            staged = stager.stage(captured, attempt=ATTEMPT, step=step + 1, rank=0, world_size=1, wait_s=60.0)
            seconds["ours"].append(staged.stall_s)
            if not keeper.flush(FLUSH_S):
                raise SystemExit(f"a save was not stored within {FLUSH_S:g} s")
    for step in range(rounds + 2):
        for name, options in async_ways.items():
            peer = scratch / f"peer-{step}"
            started = time.perf_counter()
            future = dcp.async_save(dict(tensors), checkpoint_id=peer, **options)
            seconds[name].append(time.perf_counter() - started)
            future.result()
            shutil.rmtree(peer)
        writer = dcp.FileSystemWriter(scratch / f"synced-{step}", sync_files=True)
        seconds["fsync"].append(timed(lambda w=writer: dcp.save(dict(tensors), storage_writer=w)))
        shutil.rmtree(scratch / f"synced-{step}")
    # Each of our two buffers and each of the peers' caches is met cold once: left out of all. Of the rest the best, for
    # whatever else the machine does only ever adds.
    best = {name: min(values[2:]) for name, values in seconds.items()}

    def row(peer: str, limit: float | None, text: str) -> Figure:
        return Figure(
            name=f"snapshot stall, 210 MB, against {text}",
            ours=f"{best['ours'] * 1e3:.0f} ms",
            peer=f"{best[peer] * 1e3:.0f} ms",
            ratio=best["ours"] / best[peer],
            limit=limit,
        )

    return [
        row("memcpy", 1.10, "memcpy"),
        row("async", None, "dcp.async_save"),
        row("async, cached", None, "dcp.async_save, cached stager"),
        row("fsync", None, "dcp.save with fsync"),
    ]


def stored_bytes(scratch: Path, steps: int) -> list[Figure]:
    """A language model trained a little, with its AdamW moments: whole Shards against torch's files of the same."""
    arrays = trained_arrays(steps, text_bytes=3_000_000)
    dcp.save({name: torch.from_numpy(array) for name, array in arrays.items()}, checkpoint_id=scratch / "raw")
    raw = sum(file.stat().st_size for file in (scratch / "raw").rglob("*") if file.is_file())
    figures = []
    encoding = CheckpointConfig().encoding
    for fidelity, limit in bench_codec.LIMITS.items():
        measured = bench_codec.measure(arrays, fidelity, encoding, 1)
        ours = measured.ratio["whole"] * sum(array.nbytes for array in arrays.values())
        error = f", update error {measured.update_error:.1e}" if measured.update_error else ""
        figures.append(
            Figure(
                name=f"bytes of a Checkpoint, {fidelity}{error}",
                ours=f"{ours / 1e6:.1f} MB",
                peer=f"{raw / 1e6:.1f} MB",
                ratio=ours / raw,
                limit=limit,
            )
        )
    return figures


def throughput(scratch: Path, megabytes: int) -> list[Figure]:
    """Encode and upload to an S3 server, against the slower of its two halves alone: several ranks' Snapshots at full
    speed, and one rank's over a link, where no core that encodes is missing at the server."""
    values = torch.randn(megabytes * 250_000, generator=torch.Generator().manual_seed(1))
    raw_bytes = values.nbytes
    config = CheckpointConfig(local_disk={"mode": "off"})  # type: ignore[arg-type]
    encoded, encode_s = _encoded(values, config)
    with swift_bucket(scratch) as endpoint:
        files = fsspec.filesystem("s3", endpoint_url=endpoint, skip_instance_cache=True)
        put_s = [timed(lambda n=number: files.pipe_file(f"bench/raw/{n}", encoded)) for number in range(4)]
        tensors = [part.clone() for part in values.chunk(4)]
        with stager_into("s3://bench/run", scratch, config) as (stager, keeper):
            spans = []
            for step in (1, 2, 3):
                started = time.perf_counter()
                for rank, tensor in enumerate(tensors):
                    captured = Capture(tensors={f"model.{rank}": tensor}, shared_state={}, rank_state={})
                    stager.stage(captured, attempt=ATTEMPT, step=step, rank=rank, world_size=4, wait_s=60.0)
                if not keeper.flush(FLUSH_S):
                    raise SystemExit(f"a save was not stored within {FLUSH_S:g} s")
                spans.append(time.perf_counter() - started)
        # The server keeps up with half of what it takes at full speed while the codec has the rest of the machine.
        over_link = _over_a_link(scratch, endpoint, torch.cat([values] * 4), len(encoded) / min(put_s) / 2)
    rates = {"codec": raw_bytes / encode_s, "s3fs put": raw_bytes / min(put_s)}
    return [_against_the_slower("encode and upload", raw_bytes, min(spans), rates), over_link]


def _over_a_link(scratch: Path, endpoint: str, values: torch.Tensor, most_bytes_per_s: float) -> Figure:
    """One rank's Shard to the server behind a link about as fast as the codec, so that neither half hides the other."""
    config = CheckpointConfig(zstd_level=LINK_ZSTD_LEVEL, local_disk={"mode": "off"})  # type: ignore[arg-type]
    encoded, encode_s = _encoded(values, config)
    pace = min(len(encoded) / encode_s, most_bytes_per_s)
    link = PacedProxy(scratch, int(endpoint.rpartition(":")[2]), pace).start()
    os.environ["AWS_ENDPOINT_URL"] = link.endpoint
    try:
        files = fsspec.filesystem("s3", endpoint_url=link.endpoint, skip_instance_cache=True)
        captured = Capture(tensors={"model.w": values}, shared_state={}, rank_state={})
        spans, put_s = [], []
        with stager_into("s3://bench/link", scratch, config) as (stager, keeper):
            for step in (1, 2, 3):
                started = time.perf_counter()
                stager.stage(captured, attempt=ATTEMPT, step=step, rank=0, world_size=1, wait_s=60.0)
                if not keeper.flush(FLUSH_S):
                    raise SystemExit(f"a save was not stored within {FLUSH_S:g} s")
                spans.append(time.perf_counter() - started)
                put_s.append(timed(lambda n=step: files.pipe_file(f"bench/raw-link/{n}", encoded)))  # type: ignore[misc]
    finally:
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        link.stop()
    rates = {"codec": values.nbytes / encode_s, "s3fs put": values.nbytes / min(put_s)}
    return _against_the_slower(
        f"one Shard over {pace / 1e6:.0f} MB/s, zstd {LINK_ZSTD_LEVEL}", values.nbytes, min(spans), rates
    )


def _encoded(values: torch.Tensor, config: CheckpointConfig) -> tuple[bytes, float]:
    """The Shard of ``values`` and the seconds that the better of two encodings took."""
    chunk = RawChunk(
        name="model.w",
        dtype="float32",
        offsets=(0,),
        sizes=(values.numel(),),
        level="L1",
        itemsize=4,
        data=values.numpy().data.cast("B"),
    )
    encode_s, encoded = [], b""
    for _ in range(2):
        started = time.perf_counter()
        encoded = bytes(encode_shard([chunk], step=1, attempt=ATTEMPT, rank=0, config=config).data)
        encode_s.append(time.perf_counter() - started)
    return encoded, min(encode_s)


def _against_the_slower(what: str, raw_bytes: int, span_s: float, rates: dict[str, float]) -> Figure:
    slower = min(rates, key=lambda name: rates[name])
    ours = raw_bytes / span_s
    return Figure(
        name=f"{what}, {raw_bytes / 1e6:.0f} MB to S3, against the slower half ({slower})",
        ours=f"{ours / 1e6:.0f} MB/s",
        peer=f"{rates[slower] / 1e6:.0f} MB/s",
        ratio=ours / rates[slower],
        limit=0.90,
        at_least=True,
    )


warnings.filterwarnings("ignore", message="torch.distributed is disabled")
