"""Trains a small causal language model on the standard library's source text, in this process, and gives its state.

The state is what a worker would save: names, types and values as `workers.snapshot` captures them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch._C._distributed_c10d import HashStore
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from workers.config import DataConfig, ModelConfig, OptimConfig
from workers.dataset import TokenDataset
from workers.mesh import join_group, leave_group, world_mesh
from workers.models import ModelTemplate, instantiate, materialize
from workers.optim import build_optimizer, build_scheduler
from workers.parallelize import parallelize, reduced_gradients, scale_gradients
from workers.prepare import prepare_dataset
from workers.snapshot import capture
from workers.state import TrainingState
from workers.stream import LeafStream

__all__ = ["Arrays", "load_arrays", "save_arrays", "trained_arrays"]

Arrays = dict[str, NDArray[np.generic]]

VOCABULARY = 4096
SEQUENCE = 128
MODEL = ModelConfig(
    config={
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": SEQUENCE,
        "tie_word_embeddings": False,
    }
)
OPTIM = OptimConfig(lr=1e-3, warmup_steps=20)


def trained_arrays(steps: int, *, text_bytes: int = 12_000_000, seed: int = 0) -> Arrays:
    """Weights, moments and step counters after ``steps`` steps of 8 sequences, by stored name."""
    device = torch.device("cpu")
    with tempfile.TemporaryDirectory(prefix="raysume-bench-") as folder:
        url = Path(folder).as_uri()
        prepare_dataset("stdlib", url, sequence_length=SEQUENCE, vocab_size=VOCABULARY, max_bytes=text_bytes, seed=seed)
        join_group(HashStore(), rank=0, world_size=1, device=device, timeout_s=60.0)
        try:
            data = DataConfig(url=url, sequence_length=SEQUENCE, global_batch=8, micro_batch=8)
            return _train(TokenDataset.open(url, "train"), data, steps, seed, device)
        finally:
            leave_group()


def _train(dataset: TokenDataset, data: DataConfig, steps: int, seed: int, device: torch.device) -> Arrays:
    model = parallelize(instantiate(ModelTemplate.build(MODEL)), MODEL, world_mesh(device))
    materialize(model, device, seed)
    optimizer = build_optimizer(model, OPTIM)
    state = TrainingState(model=model, optimizer=optimizer, scheduler=build_scheduler(optimizer, OPTIM, steps))
    with LeafStream(dataset, data, seed, 0, 1) as stream:
        stream.seek(1)
        for step in range(1, steps + 1):
            for leaf in stream.leaves(step):
                logits = model(input_ids=leaf.input_ids).logits
                loss = cross_entropy(logits.flatten(0, 1), leaf.labels.flatten())
                torch.autograd.backward(loss)
            scale_gradients(reduced_gradients(model), OPTIM.clip_norm)
            optimizer.step()
            state.scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 50 == 0 or step == steps:
                print(f"step {step}: loss {float(loss.detach()):.3f}", flush=True)
    tensors = capture(state, rank=0, world_size=1).tensors
    return {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().numpy().copy()
        for name, tensor in tensors.items()
    }


def save_arrays(path: Path, arrays: Arrays) -> None:
    """Keep a trained state for another run of a bench."""
    np.savez(path, **arrays)  # type: ignore[arg-type]  # its stub takes allow_pickle for one of them


def load_arrays(path: Path) -> Arrays:
    """What `save_arrays` kept."""
    with np.load(path) as stored:
        return {name: stored[name] for name in stored.files}
