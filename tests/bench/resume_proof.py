"""What the proof of resume costs at a save, and which changes of weights it sees. One rank, the model of the first run.

    python -m tests.bench.resume_proof

Times take turns: a probe and a whole step of training, so that whatever else the machine does meets both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import yaml
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh

from workers.config import ModelConfig, OptimConfig
from workers.loss import mean_token_loss
from workers.mesh import join_group, leave_group, world_mesh
from workers.models import ModelTemplate, instantiate, materialize
from workers.names import named_parameters
from workers.optim import build_optimizer
from workers.parallelize import parallelize, reduced_gradients, scale_gradients
from workers.probe import probe_loss
from workers.stream import Leaf

ROOT = Path(__file__).resolve().parents[2]
SEQUENCE, MICRO_BATCH, NUM_LEAVES = 128, 2, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    join_group(HashStore(), rank=0, world_size=1, device=torch.device("cpu"), timeout_s=60.0)
    try:
        measure(world_mesh(torch.device("cpu")), options.rounds)
    finally:
        leave_group()


def measure(mesh: DeviceMesh, rounds: int) -> None:
    tree = yaml.safe_load((ROOT / "clusters/local/run.yaml").read_text())
    config = ModelConfig(config=tree["model"]["config"])
    model = instantiate(ModelTemplate.build(config))
    parallelize(model, config, mesh)
    materialize(model, "cpu", 0)
    optimizer = build_optimizer(model, OptimConfig())
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(tree["model"]["config"]["vocab_size"], (MICRO_BATCH, SEQUENCE + 1), generator=generator)
    leaf = Leaf(
        index=0,
        is_surplus=False,
        input_ids=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        sample_ids=np.arange(MICRO_BATCH),
    )

    def probe() -> float:
        return probe_loss(model, mean_token_loss, leaf, rank=0, is_compiled=False)

    def step() -> None:
        for _ in range(NUM_LEAVES):
            torch.autograd.backward(mean_token_loss(model, leaf) / NUM_LEAVES)
        scale_gradients(reduced_gradients(model), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    probe()
    times: dict[str, list[float]] = {"probe": [], "step": []}
    for _ in range(rounds):
        for name, deed in (("probe", probe), ("step", step)):
            began = time.process_time()
            deed()
            times[name].append(time.process_time() - began)
    probe_s, step_s = (statistics.median(times[name]) for name in ("probe", "step"))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"model of {num_parameters:,} parameters, {MICRO_BATCH} x {SEQUENCE} tokens a leaf")
    print(f"probe {probe_s * 1000:.1f} ms, step of {NUM_LEAVES} leaves {step_s * 1000:.1f} ms (CPU time, medians)")
    share = probe_s / step_s
    print(f"a probe is {share:.1%} of a step: with a save every 100 steps {share / 100:.3%} of the time")
    show_sensitivity(model, leaf)


def show_sensitivity(model: torch.nn.Module, leaf: Leaf) -> None:
    """For each tensor, the smallest of some relative changes of one of its elements and of all of them that is seen."""
    before = probe_loss(model, mean_token_loss, leaf, rank=0, is_compiled=False)
    seen: dict[str, dict[float, int]] = {"one element": {}, "all elements": {}}
    tensors = [(name, tensor.to_local()) for name, tensor in named_parameters(model)]  # type: ignore[attr-defined]
    for _, tensor in tensors:
        kept = tensor.detach().clone()
        for how, part in (("one element", tensor.view(-1)[:1]), ("all elements", tensor)):
            for change in (1e-6, 1e-4, 1e-2, 1.0):
                with torch.no_grad():
                    part.mul_(1 + change)
                found = probe_loss(model, mean_token_loss, leaf, rank=0, is_compiled=False)
                with torch.no_grad():
                    tensor.copy_(kept)
                if found != before:
                    seen[how][change] = seen[how].get(change, 0) + 1
    for how, counts in seen.items():
        told = ", ".join(f"{change:g}: {count} of {len(tensors)}" for change, count in sorted(counts.items()))
        print(f"tensors in which a relative change of {how} changes the loss: {told}")


if __name__ == "__main__":
    main()
