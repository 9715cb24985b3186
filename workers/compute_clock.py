"""How long this rank itself computed in a step, waiting for other ranks left out: what tells a slow machine.

It times the forward of the modules that hold no collective inside, from after their parameters were gathered to before
they are dropped again. The backward is left out: its collectives overlap it. On a GPU the times are taken on the device
and read when they have long arrived, so no step waits for them. It judges nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from workers.parallelize import decoder_blocks

__all__ = ["ComputeClock"]

_MAX_WAITING = 4  # steps whose device times are outstanding; older ones are given up

Mark = tuple[torch.cuda.Event, torch.cuda.Event]


class ComputeClock:
    """One per rank and Attempt. Holds no module; the modules hold its hooks."""

    def __init__(self, device: torch.device, *, monotonic: Callable[[], float] = time.perf_counter) -> None:
        self._is_cuda = device.type == "cuda"
        self._monotonic = monotonic
        self._total_s = 0.0
        self._open: list[Any] = []
        self._marks: list[Mark] = []
        self._waiting: deque[list[Mark]] = deque(maxlen=_MAX_WAITING)
        self._spare: list[Mark] = []
        self._newest_s = 0.0

    def attach(self, model: nn.Module) -> None:
        """Time ``model``, which is sharded already, from now on."""
        for module in _modules_without_collectives(model):
            # Behind the hook that gathers the parameters, and before the one that drops them.
            module.register_forward_pre_hook(self._begin)
            module.register_forward_hook(self._end, prepend=True)

    def take(self) -> float:
        """Seconds of computing since the last call; on a GPU those of the newest step whose times have arrived. 0:
        nothing was measured."""
        self._open.clear()
        if not self._is_cuda:
            total, self._total_s = self._total_s, 0.0
            return total
        self._waiting.append(self._marks)
        self._marks = []
        while self._waiting and _have_arrived(self._waiting[0]):
            marks = self._waiting.popleft()
            self._newest_s = sum(begin.elapsed_time(end) for begin, end in marks) / 1000.0
            self._spare += marks
        return self._newest_s

    def _begin(self, module: nn.Module, _args: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        if self._is_cuda:
            mark = self._spare.pop() if self._spare else _new_mark()
            mark[0].record()
            self._open.append(mark)
        else:
            self._open.append(self._monotonic())

    def _end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if not self._open:
            return
        began = self._open.pop()
        if self._is_cuda:
            began[1].record()
            self._marks.append(began)
        else:
            self._total_s += self._monotonic() - began


def _have_arrived(marks: list[Mark]) -> bool:
    """Events of one stream arrive in order, so the last tells."""
    return not marks or bool(marks[-1][1].query())  # type: ignore[no-untyped-call]


def _new_mark() -> Mark:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    return begin, end


def _modules_without_collectives(model: nn.Module) -> list[nn.Module]:
    """The innermost sharded modules: each gathers before its forward and not within. Unsharded models: their blocks."""
    sharded: list[nn.Module] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    innermost = [module for module in sharded if not any(isinstance(m, FSDPModule) for m in _inside(module))]
    return innermost or decoder_blocks(model) or [model]


def _inside(module: nn.Module) -> list[nn.Module]:
    return [one for one in module.modules() if one is not module]
