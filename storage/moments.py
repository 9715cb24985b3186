"""Which chunks of a Shard are rounded and to how many bits: the pairs of moments of one block, decided together.

Levels say what may be rounded, `bounded` what keeps the bound; here the two meet. Nothing is rounded or stored here.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass
from typing import Final

import numpy as np

from storage.bounded import Rounding, Words, choose_rounding
from storage.config import CheckpointConfig
from storage.levels import LevelTable
from storage.ordered import in_order
from storage.shard_format import RawChunk

__all__ = ["KeptMoment", "plan_moments"]

_FIRST: Final = "exp_avg"
_SECOND: Final = "exp_avg_sq"

_Block = tuple[str, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptMoment:
    """How a chunk that may be rounded is kept. ``mantissa_bits`` None: exactly, as no rounding tried kept the bound."""

    mantissa_bits: int | None
    error: float | None


_EXACT: Final = KeptMoment(mantissa_bits=None, error=None)


@dataclass(frozen=True, slots=True)
class _Pair:
    first: int
    second: int


def plan_moments(chunks: Sequence[RawChunk], config: CheckpointConfig, pool: Executor | None) -> dict[int, KeptMoment]:
    """For the number of every chunk that may be rounded, how it is kept. Without its partner it is kept exactly."""
    table = LevelTable.of(config)
    wanted = {
        number for number, chunk in enumerate(chunks) if table.treatment(chunk.name, chunk.dtype).fidelity == "bounded"
    }
    if not wanted:
        return {}

    def choose(pair: _Pair) -> Rounding | None:
        return choose_rounding(
            _words(chunks[pair.first]),
            _words(chunks[pair.second]),
            bound=config.moment_bound,
            round_exp_avg=pair.first in wanted,
            round_exp_avg_sq=pair.second in wanted,
        )

    kept = dict.fromkeys(wanted, _EXACT)
    # Choosing takes little memory of its own, however large the pair.
    with closing(in_order(choose, _pairs(chunks, wanted), lambda _: 0, pool)) as chosen:
        for pair, rounding in chosen:
            if rounding is None:
                continue
            widths = ((pair.first, rounding.exp_avg_bits), (pair.second, rounding.exp_avg_sq_bits))
            for number, bits in widths:
                if number in wanted:
                    kept[number] = KeptMoment(mantissa_bits=bits, error=rounding.error)
    return kept


def _pairs(chunks: Sequence[RawChunk], wanted: set[int]) -> list[_Pair]:
    """Both moments of one block of a parameter, at least one of which is wanted."""
    firsts: dict[_Block, int] = {}
    seconds: dict[_Block, int] = {}
    for number, chunk in enumerate(chunks):
        parameter, _, key = chunk.name.rpartition(".")
        side = {_FIRST: firsts, _SECOND: seconds}.get(key)
        if side is not None and chunk.dtype == "float32":
            side[parameter, chunk.offsets, chunk.sizes] = number
    pairs = [_Pair(first, seconds[block]) for block, first in firsts.items() if block in seconds]
    return [pair for pair in pairs if pair.first in wanted or pair.second in wanted]


def _words(chunk: RawChunk) -> Words:
    return np.frombuffer(chunk.data, np.uint32)
