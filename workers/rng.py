"""Random number generators of one rank as tensors, and the rule that seeds a rank which has no saved state.

Per rank, always: ranks that share a generator state would drop the same units out.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping

import numpy as np
import torch
import xxhash

__all__ = ["capture_rng", "restore_rng", "rng_prefix", "seed_rng"]

_PYTHON_WORDS = 625
_NUMPY_WORDS = 624
_OWN = "cuda_own"


def rng_prefix(rank: int) -> str:
    """What the names of one rank's generator tensors start with."""
    return f"rng.rank-{rank:05d}."


def capture_rng(rank: int) -> dict[str, torch.Tensor]:
    """Python, NumPy, torch CPU and every CUDA device this process sees, with word of which is the rank's own."""
    prefix = rng_prefix(rank)
    states = {
        f"{prefix}python": _python_state(),
        f"{prefix}numpy": _numpy_state(),
        f"{prefix}torch_cpu": torch.get_rng_state(),
    }
    for index in _cuda_devices():
        states[f"{prefix}cuda_{index}"] = torch.cuda.get_rng_state(index)
    if _cuda_devices():
        states[f"{prefix}{_OWN}"] = torch.tensor(torch.cuda.current_device())
    return states


def restore_rng(rank: int, states: Mapping[str, torch.Tensor], *, seed: int = 0, step: int = 0) -> tuple[str, ...]:
    """Set the generators from ``states``; returns the CUDA devices that no state was saved for, which are seeded from
    (seed, rank, step) as those of a new rank. A rank goes on with its own device's state, whatever its index is now."""
    prefix = rng_prefix(rank)
    _set_python_state(states[f"{prefix}python"])
    _set_numpy_state(states[f"{prefix}numpy"])
    torch.set_rng_state(states[f"{prefix}torch_cpu"])
    missing = []
    for index, saved in _saved_for(prefix, states).items():
        if saved is None:
            missing.append(f"cuda:{index}")
            torch.cuda.default_generators[index].manual_seed(_seed_of(seed, rank, step))
        else:
            torch.cuda.set_rng_state(saved, index)
    return tuple(missing)


def _saved_for(prefix: str, states: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor | None]:
    """The state of each device here. Devices are counted from the rank's own, on both sides."""
    num_here = len(_cuda_devices())
    if not num_here:
        return {}
    by_index = {index: state for name, state in states.items() if (index := _device_index(name)) is not None}
    saved = [by_index[index] for index in sorted(by_index)]
    here = torch.cuda.current_device()
    own = states.get(f"{prefix}{_OWN}")  # older Checkpoints do not say: by index then
    then = here if own is None else int(own)
    found: dict[int, torch.Tensor | None] = {}
    for index in range(num_here):
        place = (index - here) % num_here
        found[index] = saved[(then + place) % len(saved)] if place < len(saved) else None
    return found


def _device_index(name: str) -> int | None:
    index = name.rpartition(".cuda_")[2]
    return int(index) if ".cuda_" in name and index.isdigit() else None


def seed_rng(seed: int, rank: int, step: int) -> None:
    """Seed every generator of this rank from (seed, rank, step): different for each rank, equal at each repetition."""
    value = _seed_of(seed, rank, step)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.manual_seed(value)  # CUDA devices included


def _seed_of(seed: int, rank: int, step: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{seed}/{rank}/{step}".encode()) & ((1 << 63) - 1)


def _cuda_devices() -> range:
    """Only devices of a process that uses CUDA: asking would otherwise make a context on each."""
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # type: ignore[no-untyped-call]


def _double_bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _from_bits(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


def _python_state() -> torch.Tensor:
    version, words, gauss = random.getstate()
    tail = (version, int(gauss is not None), _double_bits(gauss or 0.0))
    return torch.tensor((*words, *tail), dtype=torch.int64)


def _set_python_state(state: torch.Tensor) -> None:
    values = [int(value) for value in state.tolist()]
    words, (version, has_gauss, bits) = values[:_PYTHON_WORDS], values[_PYTHON_WORDS:]
    random.setstate((version, tuple(words), _from_bits(bits) if has_gauss else None))


def _numpy_state() -> torch.Tensor:
    state = np.random.get_state(legacy=True)
    assert isinstance(state, tuple)  # legacy=True
    _, words, position, has_gauss, gauss = state
    values = [int(word) for word in words] + [int(position), int(has_gauss), _double_bits(float(gauss))]
    return torch.tensor(values, dtype=torch.int64)


def _set_numpy_state(state: torch.Tensor) -> None:
    values = [int(value) for value in state.tolist()]
    words, (position, has_gauss, bits) = values[:_NUMPY_WORDS], values[_NUMPY_WORDS:]
    np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), position, has_gauss, _from_bits(bits)))
