"""One digest of the whole model's weights, equal for equal weights whatever the world size.

Proof that two Runs ended alike. It is not how Shards are checked: those carry digests of their own.
"""

from __future__ import annotations

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from workers.evaluation import reshard
from workers.names import named_parameters

__all__ = ["weights_digest"]


def weights_digest(model: nn.Module, *, rank: int) -> str | None:
    """xxh3_64 over the full fp32 parameters in name order, on rank 0; None on the others.

    Collective: every rank calls it. One tensor at a time is gathered, so a device holds its part and one whole tensor.
    """
    reshard(model)  # a loop's own evaluation leaves some parameters whole, and as its forward computes with them
    digest = xxhash.xxh3_64()
    with torch.no_grad():
        for _, parameter in sorted(named_parameters(model), key=lambda item: item[0]):
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if rank == 0:
                digest.update(full.detach().to("cpu", torch.float32).contiguous().flatten().numpy().data)
    return digest.hexdigest() if rank == 0 else None
