"""One optimizer step on this rank's own parts of sharded parameters, as plain tensors.

An elementwise update of a shard needs nothing of the others, so DTensor has nothing to add; and in a process's first
step on a new mesh it would take longer than all else, working out how each of the optimizer's operations is sharded.
Optimizers that look at whole tensors take their step as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from torch import optim
from torch.distributed.tensor import DTensor

__all__ = ["ELEMENTWISE", "looks_at_no_tensor", "step_locally"]

Hook = TypeVar("Hook", bound=Callable[..., Any])

_MARK: Final = "_looks_at_no_tensor"

# Their very classes: what derives from them may look at more than single elements. Each is tested to give the same bits
# however its parameters are cut.
ELEMENTWISE = frozenset(
    {optim.AdamW, optim.Adam, optim.SGD, optim.NAdam, optim.RAdam, optim.Adamax, optim.RMSprop, optim.Adagrad}
)


def looks_at_no_tensor(hook: Hook) -> Hook:
    """Marks a hook of an optimizer that is nothing but a call before or after its step: it may meet plain tensors."""
    setattr(hook, _MARK, True)
    return hook


def step_locally(optimizer: optim.Optimizer) -> None:
    """`optimizer.step()`, with the same result in parameters and state, which stay sharded."""
    if not _is_elementwise(optimizer):
        optimizer.step()
        return
    with torch.no_grad():
        _step_on_parts(optimizer)


def _step_on_parts(optimizer: optim.Optimizer) -> None:
    state, groups = optimizer.state, optimizer.param_groups
    wholes = [group["params"] for group in groups]
    parts = {whole: _part_with_gradient(whole) for params in wholes for whole in params}
    optimizer.state = defaultdict(
        dict,
        {
            part: {key: _part(value) for key, value in state[whole].items()}
            for whole, part in parts.items()
            if whole in state
        },
    )
    for group, params in zip(groups, wholes, strict=True):
        group["params"] = [parts[whole] for whole in params]
    try:
        optimizer.step()
    finally:
        stepped, optimizer.state = optimizer.state, state
        for group, params in zip(groups, wholes, strict=True):
            group["params"] = params
        for whole, part in parts.items():
            if part is not whole:
                part.grad = None  # it would keep the gradients' memory until the next step
    for whole, part in parts.items():
        for key, value in stepped.get(part, {}).items():
            if key not in state[whole] or _part(state[whole][key]) is not value:
                state[whole][key] = _as_sharded(value, key, whole, part)


def _is_elementwise(optimizer: optim.Optimizer) -> bool:
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    has_hooks = not all(getattr(hook, _MARK, False) for hook in hooks)
    is_differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
    return type(optimizer) in ELEMENTWISE and not has_hooks and not is_differentiable


def _part(value: Any) -> Any:
    """The tensor itself that a DTensor holds here, without a copy; under no_grad."""
    return value.to_local() if isinstance(value, DTensor) else value


def _part_with_gradient(whole: torch.Tensor) -> torch.Tensor:
    part: torch.Tensor = _part(whole)
    if part is not whole:
        part.grad = None if whole.grad is None else _part(whole.grad)
    return part


def _as_sharded(value: Any, key: str, whole: torch.Tensor, part: torch.Tensor) -> Any:
    """New state of a parameter's shape is sharded as the parameter is."""
    is_like_it = isinstance(value, torch.Tensor) and key != "step" and value.shape == part.shape
    if not is_like_it or not isinstance(whole, DTensor):
        return value
    return DTensor.from_local(
        value, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
