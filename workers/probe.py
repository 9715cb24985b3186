"""One fixed batch and its loss under a model as it stands: what proves, later, that weights are those that were saved.

Training must not be able to tell that it was taken: modes, buffers and random state are afterwards what they were.
Judging a loss is `proof`'s business.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import nn

from workers.evaluation import reshard
from workers.loss import LossOf
from workers.rng import capture_rng, restore_rng, seed_rng
from workers.stream import Leaf

__all__ = ["ProbeBatch", "ProbeRows", "environment_of", "probe_loss", "probe_rows"]

_log = logging.getLogger(__name__)
_CPU_INFO: Final = Path("/proc/cpuinfo")

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProbeBatch:
    """``tokens_digest``: xxh3_128 of the tokens as int64, to tell other data under the same row ids."""

    leaf: Leaf
    tokens_digest: str


class Rows(Protocol):
    """Training data, as much of it as is needed here."""

    @property
    def num_rows(self) -> int: ...


class ProbeRows:
    """A process's newest probe batch, so that one that is warm reads it once and not at every regroup."""

    def __init__(self) -> None:
        self.is_lack_told = False  # that there is no probe, in this process
        self._ids: tuple[int, ...] = ()
        self._batch: ProbeBatch | None = None

    def batch(self, ids: Sequence[int], read: Callable[[Ids], Ids]) -> ProbeBatch:
        """``read`` gives the rows of these ids, one token longer than a sequence. What it raises is passed on."""
        wanted = tuple(ids)
        if self._batch is None or self._ids != wanted:
            self._batch, self._ids = _batch_of(np.array(wanted, dtype=np.int64), read), wanted
        return self._batch


def _batch_of(ids: Ids, read: Callable[[Ids], Ids]) -> ProbeBatch:
    rows = np.ascontiguousarray(read(ids), dtype=np.int64)
    tokens = torch.from_numpy(rows)
    leaf = Leaf(
        index=0,
        is_surplus=False,
        input_ids=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        sample_ids=ids,
    )
    return ProbeBatch(leaf=leaf, tokens_digest=xxhash.xxh3_128_hexdigest(rows.tobytes()))


def probe_rows(dataset: Rows, *, seed: int, count: int) -> tuple[int, ...]:
    """Ids of ``count`` neighbouring training rows that the seed alone decides: one read, or two at the end."""
    first = xxhash.xxh3_64_intdigest(f"probe 1:{seed}".encode()) % dataset.num_rows
    return tuple((first + number) % dataset.num_rows for number in range(count))


def environment_of(device: torch.device, *, compute_dtype: str, is_causal_lm: bool, wrapping: str) -> dict[str, str]:
    """What decides, beside weights and data, which bits a forward gives. ``wrapping``: how the model is parallel, which
    says where it is cast to ``compute_dtype``."""
    return {
        "device": device.type,
        "compute_dtype": compute_dtype,
        "torch": torch.__version__,
        "transformers": _transformers_version() if is_causal_lm else "",
        "machine": _machine() if device.type == "cpu" else torch.cuda.get_device_name(device),
        "threads": str(torch.get_num_threads()) if device.type == "cpu" else "",
        "wrapping": "" if compute_dtype == "float32" else wrapping,
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
    }


def probe_loss(model: nn.Module, loss: LossOf, leaf: Leaf, *, rank: int, is_compiled: bool) -> float:
    """The loss of ``leaf``, which lies on the model's device, in eval mode. Collective where the model is sharded."""
    with _undisturbed(model, rank), torch.no_grad(), _eager(is_compiled):
        model.eval()
        return float(loss(model, leaf))


@contextmanager
def _undisturbed(model: nn.Module, rank: int) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        _KeptBuffer(module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    rng = capture_rng(rank)
    # A loss that draws at random although the model evaluates draws the same at the save and after the load.
    seed_rng(0, 0, 0)
    try:
        yield
    finally:
        restore_rng(rank, rng)
        for module, mode in modes:
            module.training = mode
        changed = [kept.name for kept in buffers if kept.put_back()]
        reshard(model)
        if changed:
            _log.info("rank %d: the probe's forward changed buffers, which were put back: %s", rank, changed[:8])


class _KeptBuffer:
    """A buffer as it was."""

    def __init__(self, module: nn.Module, name: str, buffer: torch.Tensor) -> None:
        self.name = name
        self._module, self._buffer = module, buffer
        self._version, self._copy = buffer._version, buffer.detach().clone()

    def put_back(self) -> bool:
        """Whether it had changed."""
        is_other = self._module._buffers.get(self.name) is not self._buffer
        if is_other:
            self._module._buffers[self.name] = self._buffer
        if self._buffer._version != self._version:
            with torch.no_grad():
                self._buffer.copy_(self._copy)
            return True
        return is_other


def _eager(is_compiled: bool) -> AbstractContextManager[object]:
    """Compiled blocks run uncompiled: another mode than training's would have them compiled once more, for minutes."""
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()


def _transformers_version() -> str:
    from transformers import __version__  # loaded already by whoever built such a model

    return str(__version__)


def _machine() -> str:
    """Kernels are chosen by the processor's abilities, and their sums differ in the last bit."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {name}".strip()
