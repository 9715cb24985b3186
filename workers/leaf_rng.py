"""Randomness that belongs to a leaf: its forward draws the same numbers whichever rank runs it, in whichever round.

Every global generator (Python, NumPy, torch on the CPU and on each CUDA device in use) is seeded from (seed, step,
leaf) before the leaf. After the leaves of a step the rank's own generators go on as if the leaves had drawn nothing. A
generator object that a model keeps for itself is not reached.
"""

from __future__ import annotations

import random
from typing import Literal

import numpy as np
import torch
import xxhash

from workers.rng import capture_rng, restore_rng

__all__ = ["LeafRng"]

Purpose = Literal["train", "eval"]


class LeafRng:
    """Of this process. `begin` before each leaf, `end` after the last of a step; it does nothing without `begin`."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: dict[str, torch.Tensor] | None = None

    def begin(self, step: int, leaf_index: int, *, purpose: Purpose = "train") -> None:
        """Seed all generators for this leaf; the first time in a step, keep the rank's own aside."""
        if self._own is None:
            self._own = capture_rng(0)
        value = _seed_of(self._seed, purpose, step, leaf_index)
        random.seed(value)
        np.random.seed(value & 0xFFFFFFFF)
        torch.manual_seed(value)  # CUDA devices included

    def end(self) -> None:
        """Give the rank its own generators back."""
        own, self._own = self._own, None
        if own is not None:
            restore_rng(0, own)


def _seed_of(seed: int, purpose: Purpose, step: int, leaf_index: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{purpose}/{seed}/{step}/{leaf_index}".encode()) & ((1 << 63) - 1)
