"""What several ranks hold alike: summing the gradients of what is whole on every rank, and who writes which of it.

Under `model.parallelism: ddp` every parameter is whole, under FSDP2 the few that cannot be sharded. The model stays the
module that it was: nothing wraps it, nothing hangs on a process group, so that nothing of an Attempt outlives it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["Holding", "accumulate_in_double", "compute_in", "deal", "holding", "is_first_replica", "sum_gradients"]

_BUCKET_BYTES: Final = 25 << 20
_IN_FLIGHT: Final = 2  # buckets whose sums are under way, so that gradients are not held twice
_SMALL_BYTES: Final = 4096  # less than that is left to rank 0, which has plain state to write anyway
_DOUBLE: Final = "_raysume_leaf_sum"


def compute_in(model: nn.Module, dtype: torch.dtype, device_type: str) -> None:
    """Have ``model`` compute in ``dtype`` by torch's autocast; its parameters and their gradients stay as they are."""
    forward = model.forward

    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype=dtype):
            return forward(*args, **kwargs)

    model.forward = cast


def accumulate_in_double(model: nn.Module) -> None:
    """Sum the gradients of a step's leaves in fp64, in which `sum_gradients` then sums over ranks.

    For parameters that have their memory: what is made of one on meta loses its hooks.
    """

    def take(parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        total: torch.Tensor | None = getattr(parameter, _DOUBLE)
        if total is None:
            setattr(parameter, _DOUBLE, gradient.to(torch.float64))
        else:
            total.add_(gradient)

    for parameter in model.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            setattr(parameter, _DOUBLE, None)
            parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """Gradients on their way, one behind the other, and behind them for each how many ranks have one."""

    parameters: tuple[nn.Parameter, ...]
    is_missing: tuple[bool, ...]
    flat: torch.Tensor
    work: dist.Work | None


def sum_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Sum the gradients of ``parameters``, all of them whole here, over ranks. Collective, once a step.

    A parameter that some ranks did not use counts zero there; one that no rank used keeps no gradient.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    under_way: deque[_Bucket] = deque()
    for members in _buckets(trained):
        if len(under_way) == _IN_FLIGHT:
            _finish(under_way.popleft())
        under_way.append(_start(members))
    while under_way:
        _finish(under_way.popleft())
    return [parameter.grad for parameter in trained if parameter.grad is not None]


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, ...]]:
    """In their order, and of one type each: the same on all ranks, whichever gradients are there."""
    filling: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        members = filling.setdefault(parameter.dtype, [])
        members.append(parameter)
        if sum(member.nbytes for member in members) >= _BUCKET_BYTES:
            yield tuple(filling.pop(parameter.dtype))
    yield from (tuple(members) for members in filling.values())


def _start(parameters: tuple[nn.Parameter, ...]) -> _Bucket:
    gradients = [_own_gradient(parameter) for parameter in parameters]
    is_double = any(hasattr(parameter, _DOUBLE) for parameter in parameters)
    num = sum(parameter.numel() for parameter in parameters)
    flat = torch.zeros(
        num + len(parameters),
        dtype=torch.float64 if is_double else parameters[0].dtype,
        device=parameters[0].device,
    )
    offset = 0
    for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        if gradient is not None:
            flat[offset : offset + parameter.numel()].view(parameter.shape).copy_(gradient)
            flat[num + index] = 1
        offset += parameter.numel()
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    return _Bucket(
        parameters=parameters,
        is_missing=tuple(gradient is None for gradient in gradients),
        flat=flat,
        work=None if is_alone else dist.all_reduce(flat, async_op=True),
    )


def _finish(bucket: _Bucket) -> None:
    if bucket.work is not None:
        bucket.work.wait()
    sums, offset = bucket.flat, 0
    # Where a gradient was made here, others need not be asked, and the device not be waited for.
    counts = sums[-len(bucket.parameters) :].tolist() if any(bucket.is_missing) else None
    for index, parameter in enumerate(bucket.parameters):
        total = sums[offset : offset + parameter.numel()].view(parameter.shape)
        offset += parameter.numel()
        if hasattr(parameter, _DOUBLE):
            setattr(parameter, _DOUBLE, None)
        if counts is not None and not counts[index]:
            continue
        if parameter.grad is None:
            parameter.grad = total.to(parameter.dtype, copy=True)
        else:
            parameter.grad.copy_(total)


def _own_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    double: torch.Tensor | None = getattr(parameter, _DOUBLE, None)
    gradient = parameter.grad if double is None else double
    if gradient is not None and gradient.layout is not torch.strided:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} has a gradient of layout {gradient.layout}, which is not "
            "summed over ranks; build its module with sparse=False"
        )
    return gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """That ``count`` ranks hold a tensor alike, this one as number ``index``; ``label`` tells them from other such."""

    label: str
    index: int
    count: int


def holding(tensor: torch.Tensor, *, rank: int, world_size: int) -> Holding | None:
    """Who else holds what this rank does of ``tensor``; None: nobody."""
    if not isinstance(tensor, DTensor):
        return Holding(label="whole", index=rank, count=world_size)
    copies = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    if not copies:
        return None
    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if place is None:
        return None
    (dim,) = copies  # the meshes of this package have one at most
    shard = "-".join(str(at) for other, at in enumerate(place) if other != dim)
    return Holding(label=f"shard-{shard}", index=place[dim], count=mesh.size(dim))


def is_first_replica(model: nn.Module) -> bool:
    """Whether this rank is of the replica that is counted, where what is sharded has several."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            held = holding(parameter, rank=0, world_size=1)
            return held is None or held.index == 0
    return True


def deal(units: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """Who writes what: for each unit of so many bytes one of ``num_ranks``, so that all have about as much to write.

    A function of names and sizes alone, so that every rank comes to the same answer by itself.
    """
    loads = [0] * num_ranks
    owners: dict[str, int] = {}
    for name, num_bytes in sorted(units.items(), key=lambda unit: (-unit[1], unit[0])):
        owner = 0 if num_bytes < _SMALL_BYTES else loads.index(min(loads))
        loads[owner] += num_bytes
        owners[name] = owner
    return owners
