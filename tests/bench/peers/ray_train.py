"""Ray Train V2 with FSDP2 and torch's DCP, elastic between 3 and 4 workers: a node SIGKILLed, seconds to the next step.

Run as a module it is the driver of one run, so that the environment variables that tune Ray Train are its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from orchestrator.local_cluster import LocalCluster, descendants
from tests.bench.peers.steps import Kill, first_after, read_steps, wait_for_step

__all__ = ["TUNED", "measure"]

TUNED = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
"""The settings with which it was quickest here; its defaults are 60 and 2 seconds."""

_START_S = 240.0
_RECOVERY_S = 240.0
_SAVE_EVERY = 10
_NUM_LEAVES = 8


def measure(
    fault: Literal["kill-node", "kill-worker"], *, model: Literal["llama", "mlp"], tuned: bool, kill_at: int, seed: int
) -> Kill:
    """One run on four local nodes with one fault at a random moment of the step after ``kill_at``."""
    draw = random.Random(seed)
    cluster = LocalCluster(node_resources={"CPU": 1})
    with tempfile.TemporaryDirectory(prefix="ray-train-bench-") as scratch:
        steps = Path(scratch) / "steps.jsonl"
        driver: subprocess.Popen[bytes] | None = None
        try:
            for _ in range(4):
                cluster.add_node()
            command = [sys.executable, "-m", "tests.bench.peers.ray_train", "--address", cluster.address]
            command += ["--scratch", scratch, "--model", model]
            environment = os.environ | {"RAY_TRAIN_V2_ENABLED": "1"} | (TUNED if tuned else {})
            log = (Path(scratch) / "driver.log").open("wb")
            driver = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            wait_for_step(steps, kill_at, _START_S)
            time.sleep(draw.random() * read_steps(steps)[-1]["step_s"])
            # Rank 0 writes the steps; whichever node is hit, another rank 0 goes on writing.
            number = draw.choice(sorted(cluster.nodes))
            killed_at = time.time()
            if fault == "kill-node":
                cluster.bury(cluster.kill_node(number))
            else:
                os.kill(_worker_of(cluster.nodes[number].raylet_pid), signal.SIGKILL)
            return first_after(steps, killed_at, _RECOVERY_S, world_size=3 if fault == "kill-node" else 4)
        finally:
            if driver is not None:
                driver.kill()
                driver.wait(timeout=30)
            cluster.close()


def _worker_of(raylet_pid: int) -> int:
    """The process that trains on a node: of Ray's workers there the one with the most memory."""
    found = [(int(Path(f"/proc/{pid}/statm").read_text().split()[1]), pid) for pid in descendants(raylet_pid)]
    return max(found)[1]


def _train(config: dict[str, Any]) -> None:
    import ray.train
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn import functional

    from tests.bench.peers.models import llama, make_mlp, mlp_batch, token_batch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    is_mlp = config["model"] == "mlp"
    model = make_mlp() if is_mlp else llama()
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model.children() if is_mlp else model.model.layers:
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            state, optim_state = get_state_dict(model, optimizer)
            loaded: dict[str, Any] = {"model": state, "optim": optim_state, "step": torch.tensor(0)}
            load(loaded, checkpoint_id=directory)
            set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
            step = int(loaded["step"])
    while step < config["steps"]:
        began = time.monotonic()
        step += 1
        leaves = range(rank, _NUM_LEAVES, world_size)
        for index in [*leaves] + [0] * (-(-_NUM_LEAVES // world_size) - len(leaves)):
            if is_mlp:
                loss = model(mlp_batch(step, index)).square().mean()
            else:
                tokens = token_batch(step, index)
                logits = model(input_ids=tokens).logits
                loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        if rank == 0:
            line = {"step": step, "at_s": time.time(), "step_s": time.monotonic() - began, "world_size": world_size}
            with Path(config["out"]).open("a") as out:
                out.write(json.dumps(line) + "\n")
        if step % _SAVE_EVERY == 0:
            directory = str(Path(config["saves"]) / f"step-{step}")
            state, optim_state = get_state_dict(model, optimizer)
            save({"model": state, "optim": optim_state, "step": torch.tensor(step)}, checkpoint_id=directory)
            kept = ray.train.Checkpoint.from_directory(directory) if rank == 0 else None
            ray.train.report({"step": step}, checkpoint=kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--model", choices=["llama", "mlp"], required=True)
    options = parser.parse_args()
    import ray
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig

    root = str(Path(__file__).resolve().parents[3])
    ray.init(address=options.address, runtime_env={"env_vars": {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}})
    scratch: Path = options.scratch
    trainer = TorchTrainer(
        _train,
        train_loop_config={
            "model": options.model,
            "steps": 10_000,
            "out": str(scratch / "steps.jsonl"),
            "saves": str(scratch / "saves"),
        },
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=(3, 4), resources_per_worker={"CPU": 1}, elastic_resize_monitor_interval_s=5.0
        ),
        run_config=RunConfig(
            name="bench", storage_path=str(scratch / "storage"), failure_config=FailureConfig(max_failures=-1)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
