"""Builds a Hugging Face causal LM on the meta device once, hands out copies, and fills a sharded copy with values.

Weights depend on seed, module name and full shape alone, never on rank or world size. Sharding is `parallelize`'s work.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from workers.config import ModelConfig
from workers.errors import WorkersError
from workers.names import clean_name, named_parameters, persistent_buffers, unwrapped

__all__ = [
    "ModelTemplate",
    "UnfilledTensors",
    "assert_all_filled",
    "instantiate",
    "materialize",
    "state_bytes",
]

_BOOL_SENTINEL = 0xFF


class UnfilledTensors(WorkersError):
    """Parameters or buffers that nobody gave a value; ``names`` lists them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(names)
        self.names = names

    def __str__(self) -> str:
        shown = ", ".join(self.names[:8]) + (f" and {len(self.names) - 8} more" if len(self.names) > 8 else "")
        return (
            f"{len(self.names)} parameters or buffers were never filled: {shown}; "
            "give their module a reset_parameters(), or the model an _init_weights(module) that sets them"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTemplate:
    """A model on the meta device, built once per process: importing and building it is the slow part of a regroup."""

    model: nn.Module

    @classmethod
    def build(cls, config: ModelConfig) -> ModelTemplate:
        # Imported here: transformers takes seconds to load and only a worker that trains needs it.
        from transformers import AutoConfig, AutoModelForCausalLM

        settings = dict(config.config)
        model_config = AutoConfig.for_model(str(settings.pop("model_type")), **settings)
        model_config.use_cache = False
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                model_config, dtype=torch.float32
            )
        return cls(model=model.train())


def instantiate(template: ModelTemplate) -> nn.Module:
    """A fresh copy on meta, in milliseconds; ties between parameters are kept."""
    return copy.deepcopy(template.model)


def materialize(model: nn.Module, device: torch.device | str, seed: int, *, init_weights: bool = True) -> None:
    """Give a (sharded) meta model memory on ``device`` and values.

    With ``init_weights`` false the weights stay marked as unfilled, for a restore that fills them; the restore then
    ends in `assert_all_filled`.
    """
    model = unwrapped(model)
    with torch.no_grad():
        ties = _ties(model)
        model.to_empty(device=device)
        for first, *others in ties:
            for table, key in others:
                table[key] = first[0][first[1]]
        for _, tensor in _tensors(model):
            _mark_unfilled(tensor)
        _recompute_buffers(model)
        if init_weights:
            _initialise(model, seed)
    if init_weights:
        assert_all_filled(model)


def assert_all_filled(model: nn.Module) -> None:
    """Raise UnfilledTensors when any value that `materialize` marked is still there."""
    with torch.no_grad():
        names = tuple(clean_name(name) for name, tensor in _tensors(unwrapped(model)) if _has_mark(tensor))
    if names:
        raise UnfilledTensors(names)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Local part of every parameter and buffer, non-persistent buffers included."""
    for items in (model.named_parameters(), model.named_buffers()):
        for name, tensor in items:
            yield name, tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _ties(model: nn.Module) -> list[list[tuple[dict[str, Any], str]]]:
    """The places of each parameter and buffer that has several: moved from meta, each would get one of its own."""
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((table, key))
    return [several for several in places.values() if len(several) > 1]


def _mark_unfilled(tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.bool:
        tensor.view(torch.uint8).fill_(_BOOL_SENTINEL)
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(_integer_mark(tensor.dtype))


def _has_mark(tensor: torch.Tensor) -> bool:
    if tensor.is_meta:
        return True
    if tensor.numel() == 0:
        return False
    if tensor.dtype == torch.bool:
        return bool((tensor.view(torch.uint8) == _BOOL_SENTINEL).all())
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().all())
    return bool((tensor == _integer_mark(tensor.dtype)).all())


def _integer_mark(dtype: torch.dtype) -> int:
    limits = torch.iinfo(dtype)
    return limits.min if limits.min < 0 else limits.max


def _with_initialiser(model: nn.Module) -> Iterator[tuple[str, nn.Module, Callable[[nn.Module], object] | None]]:
    """Each module with the ``_init_weights`` of its nearest ancestor that has one."""
    stack: list[tuple[str, nn.Module, Callable[[nn.Module], object] | None]] = [("", model, None)]
    while stack:
        name, module, inherited = stack.pop()
        own = getattr(module, "_init_weights", None)
        initialiser = own if callable(own) else inherited
        yield name, module, initialiser
        children = [(f"{name}.{key}" if name else key, child, initialiser) for key, child in module.named_children()]
        stack.extend(reversed(children))


def _recompute_buffers(model: nn.Module) -> None:
    """Have every module that owns buffers compute them again, as rotary frequencies: they are in no checkpoint."""
    for _, module, initialiser in _with_initialiser(model):
        if not any(buffer is not None for buffer in module._buffers.values()):
            continue
        if initialiser is None:
            for method in ("reset_buffers", "reset_running_stats"):
                if callable(getattr(module, method, None)):
                    getattr(module, method)()
            continue
        # transformers' initialisers leave a parameter alone that carries this flag: only buffers are set here.
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        for parameter in own:
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        initialiser(module)
        for parameter in own:
            del parameter._is_hf_initialized  # type: ignore[attr-defined]


def _initialise(model: nn.Module, seed: int) -> None:
    done: set[int] = set()
    for name, module, initialiser in _with_initialiser(model):
        own = {key: p for key, p in module._parameters.items() if p is not None and id(p) not in done}
        if not own:
            continue
        done.update(id(parameter) for parameter in own.values())
        full = _full_values(module, own, initialiser, _seed_of(seed, clean_name(name)))
        for key, parameter in own.items():
            _copy_local(parameter, full[key])


def _full_values(
    module: nn.Module,
    own: dict[str, nn.Parameter],
    initialiser: Callable[[nn.Module], object] | None,
    seed: int,
) -> dict[str, torch.Tensor]:
    """Whole, unsharded values of one module's own parameters, drawn on the CPU with the model's own rules."""
    stand_in = _stand_in(module, own)
    reset: Any = getattr(stand_in, "reset_parameters", None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if initialiser is not None:
            initialiser(stand_in)
        elif callable(reset):
            reset()
    return {key: stand_in._parameters[key] for key in own}  # type: ignore[misc]


def _stand_in(module: nn.Module, own: dict[str, nn.Parameter]) -> nn.Module:
    """``module`` without children and sharding, its own parameters whole on the CPU and marked as unfilled."""
    stand_in: nn.Module = object.__new__(type(module))
    values = dict(module.__dict__)
    values["_modules"] = {}
    values["_buffers"] = {
        key: None if buffer is None else buffer.detach().to("cpu", copy=True) for key, buffer in module._buffers.items()
    }
    values["_parameters"] = dict.fromkeys(module._parameters)
    for key, parameter in own.items():
        whole = torch.full(parameter.shape, float("nan"), dtype=parameter.dtype, device="cpu")
        values["_parameters"][key] = nn.Parameter(whole, requires_grad=False)
    stand_in.__dict__.update(values)
    return stand_in


def _copy_local(parameter: nn.Parameter, full: torch.Tensor) -> None:
    if not isinstance(parameter, DTensor):
        parameter.copy_(full)
        return
    local = parameter.to_local()
    here = full.detach().to(local.device)
    # src_data_rank=None: every rank holds the same full tensor already, so nothing is sent.
    part = distribute_tensor(here, parameter.device_mesh, parameter.placements, src_data_rank=None)
    local.copy_(part.to_local())


def _seed_of(seed: int, name: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{seed}:{name}".encode()) & ((1 << 63) - 1)


def state_bytes(model: nn.Module) -> int:
    """Of the whole training state: parameters, AdamW's two moments of those that train, stored buffers."""
    weights = sum(parameter.nbytes for _, parameter in named_parameters(model))
    moments = sum(2 * 4 * parameter.numel() for _, parameter in named_parameters(model) if parameter.requires_grad)
    return weights + moments + sum(buffer.nbytes for _, buffer in persistent_buffers(model))
