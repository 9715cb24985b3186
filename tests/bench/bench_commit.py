"""What committing one step of a very large world costs: 10,000 ranks' Receipts through real actor calls, one Commit.

Real: Ray, the coordinator actor, the Keepers' messages of several Receipts each, a store on local disk, the retention
after the Commit. Made up: Shards (empty files of the right size) and the tensors, cut into rows as FSDP cuts them.
Prints the seconds from the first and from the last message to the Commit and the actor's memory, and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from orchestrator.coordinator_actor import MAX_CALLS, CoordinatorActor
from orchestrator.signals import Committed, SaveFailed
from storage.commit_log import CommitLog
from storage.config import CheckpointConfig
from storage.keys import Attempt, StepKey, shard_key
from storage.local_store import LocalStore
from storage.manifest import AttemptRecord, ChunkPlace, Receipt, ShardRecord, TensorLayout

ROOT = Path(__file__).resolve().parent.parent.parent
RUN = "bench"
ATTEMPT = Attempt(number=1, nonce="0000beef")
SHARD_BYTES = 4096
LIMIT_S, LIMIT_BYTES = 2.0, 500 << 20
OUTSTANDING = 64  # messages under way at once, as from Keepers that do not wait for each other


def layouts(rank: int, world_size: int, num_tensors: int) -> dict[str, TensorLayout]:
    """A model's weights and moments, each cut along its rows; rank 0 alone has its step counters."""
    found = {}
    for number in range(num_tensors):
        shape = (world_size * 4 - number % 3, 64 + number)
        rows = -(-shape[0] // world_size)
        start, stop = min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])
        place = ChunkPlace(rank=rank, offsets=(start, 0), sizes=(stop - start, shape[1]))
        found[f"model.layers.{number}.self_attn.q_proj.weight"] = TensorLayout(
            dtype="float32", shape=shape, level="L1", chunks=(place,) if stop > start else ()
        )
    return found


def receipt(rank: int, step: int, world_size: int, num_tensors: int) -> Receipt:
    key = shard_key(StepKey(step=step, attempt=ATTEMPT), rank)
    digest = f"{rank:032x}"
    shard = ShardRecord(rank=rank, key=key, size=SHARD_BYTES, digest=digest, index_bytes=1000, index_digest=digest)
    return Receipt(
        run_id=RUN,
        step=step,
        attempt=AttemptRecord.of(ATTEMPT),
        world_size=world_size,
        shard=shard,
        tensors=layouts(rank, world_size, num_tensors),
        shared_state={"progress": {"step": step}} if rank == 0 else None,
        rank_state={"rank": rank},
        stall_s=0.01,
        upload_s=1.0,
    )


def put_shards(root: Path, step: int, world_size: int) -> None:
    key = StepKey(step=step, attempt=ATTEMPT)
    for rank in range(world_size):
        path = root / shard_key(key, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(SHARD_BYTES)


def messages(step: int, options: argparse.Namespace) -> Iterator[Any]:
    """Put into Ray's store first: making them is the Keepers' work, not the coordinator's."""
    for start in range(0, options.ranks, options.per_message):
        ranks = range(start, min(start + options.per_message, options.ranks))
        yield ray.put(tuple(receipt(rank, step, options.ranks, options.tensors) for rank in ranks))


def one_step(coordinator: Any, step: int, root: Path, options: argparse.Namespace) -> dict[str, float]:
    put_shards(root, step, options.ranks)
    waiting = list(messages(step, options))
    num_messages = len(waiting)
    first_at = time.monotonic()
    under_way: list[Any] = []
    while waiting:
        if len(under_way) == OUTSTANDING:
            _, under_way = ray.wait(under_way, num_returns=1, timeout=60)
        under_way.append(coordinator.deliver_many.remote(waiting.pop()))
    last_at = time.monotonic()
    if not ray.get(coordinator.wait_settled.remote(step, 300.0), timeout=310):
        raise SystemExit(f"step {step} was not settled within 300 s")
    done_at = time.monotonic()
    ray.get(under_way, timeout=60)
    signals = ray.get(coordinator.drain_signals.remote(), timeout=60)
    failed = [signal.reason for signal in signals if isinstance(signal, SaveFailed)]
    if failed or not any(isinstance(signal, Committed) and signal.step == step for signal in signals):
        raise SystemExit(f"step {step} was not committed: {failed}")
    return {"messages": num_messages, "from_first_s": done_at - first_at, "from_last_s": done_at - last_at}


def peak_bytes(pid: int) -> tuple[int, int]:
    """Peak and present resident memory of a process, from Linux's own count."""
    status = Path(f"/proc/{pid}/status").read_text()
    values = {line.split(":")[0]: line.split() for line in status.splitlines()}
    return int(values["VmHWM"][1]) << 10, int(values["VmRSS"][1]) << 10


def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        root = Path(scratch) / "run"
        config = CheckpointConfig(every_steps=10)
        coordinator = CoordinatorActor.options(max_concurrency=MAX_CALLS).remote(
            run_id=RUN, root_url=str(root), config=config, total_steps=1000, metadata={}, owner="bench"
        )
        ray.get(coordinator.owner.remote(), timeout=60)
        pid: int = ray.get(coordinator.__ray_call__.remote(lambda _: os.getpid()), timeout=60)
        idle_bytes = peak_bytes(pid)[0]
        ray.get(coordinator.begin_attempt.remote(ATTEMPT, options.ranks, 0), timeout=60)
        steps = []
        for step in range(10, 10 * options.steps + 1, 10):
            steps.append(one_step(coordinator, step, root, options))
            print(f"step {step}: {steps[-1]}", flush=True)
        peak, now = peak_bytes(pid)
        log = CommitLog(LocalStore(str(root)), RUN)
        commits = log.commits()
        manifest = log.read_manifest(commits[-1])
        assert len(manifest.shards) == options.ranks
        return {
            "ranks": options.ranks,
            "tensors": options.tensors,
            "steps": steps,
            "from_last_s": max(step["from_last_s"] for step in steps),
            "from_first_s": max(step["from_first_s"] for step in steps),
            "manifest_bytes": commits[-1].manifest_bytes,
            "idle_bytes": idle_bytes,
            "peak_bytes": peak,
            "resident_bytes": now,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--per-message", type=int, default=8, help="ranks of one node, whose Keeper sends together")
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--scratch", default=None, help="where the made-up run lies; default: the temporary directory")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/bench/commit.json")
    options = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {}})
    try:
        figures = run(options)
    finally:
        ray.shutdown()
    met = {
        "seconds": figures["from_last_s"] <= LIMIT_S,
        "memory": figures["peak_bytes"] <= LIMIT_BYTES,
    }
    print(
        f"{options.ranks} ranks, {options.tensors} tensors: {figures['from_last_s']:.2f} s from the last message to "
        f"the Commit ({figures['from_first_s']:.2f} s from the first; limit {LIMIT_S:g}): "
        f"{'met' if met['seconds'] else 'missed'}; memory {figures['peak_bytes'] / 2**20:.0f} MiB, of which "
        f"{figures['idle_bytes'] / 2**20:.0f} before the first message (limit {LIMIT_BYTES >> 20}): "
        f"{'met' if met['memory'] else 'missed'}; Manifest {figures['manifest_bytes'] / 2**20:.2f} MiB"
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(
        json.dumps({**figures, "limit_s": LIMIT_S, "limit_bytes": LIMIT_BYTES, "met": met}, indent=1)
    )


if __name__ == "__main__":
    main()
