"""torchft: four replicas of the bench's MLP on gloo, one SIGKILLed; seconds to the survivors' next committed step.

Every replica holds the whole model, which is what makes torchft as quick as it is. Run as a module it is one replica.
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
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.bench.peers.steps import Kill, first_after, read_steps, wait_for_step

__all__ = ["measure"]

_START_S = 120.0
_RECOVERY_S = 60.0


def measure(*, replicas: int, kill_at: int, seed: int) -> Kill:
    """One run with one kill at a random moment of the step after ``kill_at``."""
    from torchft.coordination import LighthouseServer

    draw = random.Random(seed)
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100, heartbeat_timeout_ms=300)
    address = lighthouse.address().replace("[::]", "127.0.0.1")
    with tempfile.TemporaryDirectory(prefix="torchft-bench-") as scratch:
        files = [Path(scratch) / f"replica-{number}.jsonl" for number in range(replicas)]
        processes = [_start(address, number, path) for number, path in enumerate(files)]
        try:
            for path in files:
                wait_for_step(path, kill_at, _START_S)
            steps = read_steps(files[0])
            time.sleep(draw.random() * steps[-1]["step_s"])
            victim = draw.randrange(replicas)
            killed_at = time.time()
            os.kill(processes[victim].pid, signal.SIGKILL)
            survivor = files[(victim + 1) % replicas]
            return first_after(survivor, killed_at, _RECOVERY_S, world_size=replicas - 1)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait(timeout=10)
            lighthouse.shutdown()


def _start(lighthouse: str, number: int, path: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.bench.peers.torchft_mlp", "--number", str(number), "--steps", str(path)]
    environment = os.environ | {"TORCHFT_LIGHTHOUSE": lighthouse, "OMP_NUM_THREADS": "1", "RUST_LOG": "error"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _replica(number: int, path: Path) -> None:
    import torch
    from torch.distributed import TCPStore
    from torchft import Manager, Optimizer, ProcessGroupGloo

    from tests.bench.peers.models import make_mlp, mlp_batch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = make_mlp()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optim"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optim": inner.state_dict()},
        replica_id=f"replica-{number}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=10),
        hostname="127.0.0.1",
    )
    optimizer = Optimizer(manager, inner)
    with path.open("a", buffering=1) as out:
        while True:
            began = time.monotonic()
            step = manager.current_step()
            optimizer.zero_grad()
            model(mlp_batch(step, number)).square().mean().backward()
            # By hand: its DistributedDataParallel (0.2.0) fails an assertion under torch 2.13 when a peer dies.
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            manager.allreduce(flat).wait()
            offset = 0
            for gradient in gradients:
                gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
                offset += gradient.numel()
            optimizer.step()
            if manager.current_step() > step:
                line = {
                    "step": step + 1,
                    "at_s": time.time(),
                    "step_s": time.monotonic() - began,
                    "world_size": manager.num_participants(),
                }
                out.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--steps", type=Path, required=True)
    options = parser.parse_args()
    _replica(options.number, options.steps)


if __name__ == "__main__":
    main()
