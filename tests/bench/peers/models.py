"""The two models that every contestant of the recovery bench trains, and one batch for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

__all__ = ["MLP_BATCH", "MLP_LAYERS", "MLP_WIDTH", "RUN_CONFIG", "llama", "make_mlp", "mlp_batch", "token_batch"]

RUN_CONFIG = Path(__file__).resolve().parents[3] / "clusters/local/run.yaml"
MLP_LAYERS = 8
MLP_WIDTH = 512
MLP_BATCH = 16  # rows a micro-batch


def make_mlp() -> nn.Sequential:
    """Eight layers of 512, 2.1 M parameters: the model of the figure that torchft sets."""
    layers: list[nn.Module] = []
    for _ in range(MLP_LAYERS):
        layers += [nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def mlp_batch(step: int, index: int) -> torch.Tensor:
    """Inputs of shape (MLP_BATCH, MLP_WIDTH), fp32, the same for the same step and index."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(MLP_BATCH, MLP_WIDTH, generator=generator)


def llama() -> nn.Module:
    """The model of the shipped local configuration, on the CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings: dict[str, Any] = dict(yaml.safe_load(RUN_CONFIG.read_text())["model"]["config"])
    model_type = settings.pop("model_type")
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
    return model


def token_batch(step: int, index: int) -> torch.Tensor:
    """Token ids of one micro-batch of the shipped local configuration: shape (2, 128), int64."""
    data = yaml.safe_load(RUN_CONFIG.read_text())["data"]
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randint(0, 2048, (data["micro_batch"], data["sequence_length"]), generator=generator)
