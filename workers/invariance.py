"""What keeps a step's bits independent of the number of ranks, beside the arithmetic itself; and what cannot be kept.

`Invariance` belongs to one sharded model and is told of each leaf. What would break the promise is refused by name,
before the first step where it can be seen there. How gradients are summed is `exact_fold`'s and FSDP2's work.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase
from torch.optim import Optimizer

from workers.config import Reproducible
from workers.errors import NotReproducible
from workers.exact_fold import LeafFold, Round
from workers.local_step import ELEMENTWISE
from workers.names import clean_name
from workers.replicated import accumulate_in_double, sum_gradients
from workers.scalar_gradients import ScalarGradients

__all__ = [
    "Invariance",
    "begin_process",
    "require_invariant_modules",
    "require_invariant_optimizer",
    "require_same_kernels",
]

_CUBLAS: Final = "CUBLAS_WORKSPACE_CONFIG"
_OFF: Final = "or set reproducible: false"


class Invariance:
    """Of one model, made when it is sharded. `begin_leaf` before each leaf, `end_leaf` after its backward."""

    def __init__(self, model: nn.Module, mode: Reproducible, world_size: int) -> None:
        self.is_exact = mode == "exact"
        if self.is_exact and not isinstance(model, FSDPModule):
            raise NotReproducible("reproducible: exact needs model.parallelism: fsdp; or set reproducible: true")
        self._world_size, self._num_leaves = world_size, 0
        self._round = Round()
        self._model = model
        self._scalars: ScalarGradients | None = None
        self._is_begun = False
        self._is_leaf_open = False
        self._runs: dict[str, int] = {}
        self._buffers = _BufferWatch(model)
        self._sharded = {
            clean_name(name): module for name, module in model.named_modules() if isinstance(module, FSDPModule)
        }
        for name, module in self._sharded.items():
            self._watch(name, module)

    def begin_leaf(self, round_number: int, num_leaves: int) -> None:
        if not self._is_begun:
            self._begin()
        self._num_leaves = num_leaves
        self._round.begin(round_number, num_leaves=num_leaves, world_size=self._world_size)
        self._runs.clear()
        self._buffers.look()
        self._is_leaf_open = True

    def end_leaf(self) -> None:
        """Nothing where the leaf has been ended before."""
        if self._is_leaf_open:
            self._is_leaf_open = False
            if self._scalars is not None:
                self._scalars.take()
            self._buffers.require_unchanged()

    def sum_whole(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """The gradients of what is whole on every rank, summed over ranks, once a step. Collective."""
        self.end_leaf()
        if self._scalars is None:
            return sum_gradients(parameters)
        return self._scalars.reduce(self._num_leaves)

    def _begin(self) -> None:
        """Once the parameters have their memory: what is made of one on meta loses its hooks."""
        self._is_begun = True
        for module in self._sharded.values():
            module.reshard()  # after an evaluation of the loop's own some are whole, and would be taken for unsharded
        if self.is_exact:
            whole = [parameter for parameter in self._model.parameters() if not isinstance(parameter, DTensor)]
            self._scalars = ScalarGradients(whole)
        else:
            accumulate_in_double(self._model)

    def _watch(self, name: str, module: FSDPModule) -> None:
        assert isinstance(module, nn.Module)
        if self.is_exact:
            LeafFold(self._round).install(module, self._world_size)
        module.register_forward_pre_hook(lambda _module, _inputs: self._require_first_run(name), prepend=True)

    def _require_first_run(self, name: str) -> None:
        if not (self._is_leaf_open and torch.is_grad_enabled()) or _is_in_backward():
            return
        self._runs[name] = self._runs.get(name, 0) + 1
        if self._runs[name] > 1:
            raise NotReproducible(
                f"{name or 'the model'} runs more than once in the forward of one leaf; its gradient would then be"
                f" summed in parts whose order depends on the number of ranks; call it once a leaf, {_OFF}"
            )


class _BufferWatch:
    """Refuses a stored buffer that a leaf has changed: each rank would keep another, from its own leaves."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (clean_name(f"{prefix}.{key}" if prefix else key), module, key)
            for prefix, module in model.named_modules()
            for key in module._buffers
            if key not in module._non_persistent_buffers_set
        ]
        self._seen: list[tuple[int, int]] = []

    def look(self) -> None:
        self._seen = self._versions()

    def require_unchanged(self) -> None:
        for (name, _, _), before, now in zip(self._places, self._seen, self._versions(), strict=True):
            if now != before:
                raise NotReproducible(
                    f"buffer {name} is changed while a leaf is computed, so each rank would hold another; change it"
                    f" once a step from what all ranks know, keep it out of the state (persistent=False), {_OFF}"
                )

    def _versions(self) -> list[tuple[int, int]]:
        """Every change in place counts a tensor's version up; nothing is read of the device."""
        buffers = [module._buffers[key] for _, module, key in self._places]
        return [(0, 0) if buffer is None else (id(buffer), buffer._version) for buffer in buffers]


def begin_process(device: torch.device) -> None:
    """Have torch choose kernels that give the same bits each time, and name those that cannot. For the process."""
    if device.type == "cuda":
        os.environ.setdefault(_CUBLAS, ":4096:8")  # torch insists on it; read when cuBLAS is first used
    torch.use_deterministic_algorithms(True)
    # Else it writes over all memory that it is given.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def require_same_kernels(rank: int, device: torch.device) -> None:
    """Raise where the ranks would compute one leaf differently. Collective."""
    facts = _kernel_facts(device)
    own = torch.tensor([xxhash.xxh3_64_intdigest(facts.encode()) >> 2], device=device)
    words = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(words, own)
    found = [int(word) for word in words]
    others = [other for other, word in enumerate(found) if word != found[rank]]
    if others:
        raise NotReproducible(
            f"rank {rank} computes with {facts}, ranks {others} with something else, so one leaf has not the same bits"
            f" on all; use machines of one kind with one torch, {_OFF}"
        )


def require_invariant_modules(model: nn.Module) -> None:
    """Raise for modules whose result depends on which leaves a rank has seen."""
    for name, module in model.named_modules():
        if isinstance(module, SyncBatchNorm):
            reason = "takes its statistics over the leaves that the ranks run together"
        elif isinstance(module, _NormBase) and module.track_running_stats:
            reason = "keeps running statistics of the leaves that its rank runs"
        else:
            continue
        raise NotReproducible(
            f"{clean_name(name) or 'the model'} is a {type(module).__name__}, which {reason}; use LayerNorm, RMSNorm or"
            f" GroupNorm, or track_running_stats=False, {_OFF}"
        )


def require_invariant_optimizer(optimizer: Optimizer) -> None:
    """Raise for an optimizer whose update of an element may depend on how its parameter is cut over ranks."""
    name = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE:
        known = ", ".join(sorted(one.__name__ for one in ELEMENTWISE))
        raise NotReproducible(
            f"optimizer {name} is not known to treat every element by itself, so its update may depend on how"
            f" parameters are cut over ranks; use torch's {known}, {_OFF}"
        )
    for index, group in enumerate(optimizer.param_groups):
        if group.get("fused") and any(parameter.device.type == "cpu" for parameter in group["params"]):
            raise NotReproducible(
                f"{name} has fused=True in group {index}: on the CPU its result depends, by the last bit, on how a"
                f" parameter is cut over ranks; use foreach=True, {_OFF}"
            )


def _kernel_facts(device: torch.device) -> str:
    """What the bits of one leaf depend on beside its data."""
    if device.type == "cuda":
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        name = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, cuDNN {cudnn}"
    else:
        name = f"a CPU with {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    return f"torch {torch.__version__} on {name}"


def _is_in_backward() -> bool:
    """Whether a forward runs anew for its backward, as activation checkpointing has it."""
    return bool(torch._C._current_graph_task_id() != -1)
