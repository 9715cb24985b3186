"""Which field of the training state is kept at which Level, and how faithfully. One table; the first match decides.

L1 is exact and the default, so a field nobody thought of is never rounded. What rules a Run may add is checked where
they are declared; what rounding does is `bounded`'s affair.

L1 core: weights, buffers, step counters, trackers, random state. L2: optimizer moments, exact unless the Run asks for
bounded. L3 best effort. L4 not stored. L5 is the Checkpoint's JSON (settings, loss, lineage): no tensors, so no rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final

from storage.config import CheckpointConfig, Fidelity, LevelRule
from storage.manifest import Level, Tier

__all__ = ["LevelTable", "Treatment"]

_FLOATING: Final = ("float16", "bfloat16", "float32", "float64")
_ROUNDED: Final = "float32"


@dataclass(frozen=True, slots=True)
class Treatment:
    """How one tensor is kept. ``omit``: it is not stored at all. ``tier``: the farthest one it is carried to."""

    level: Level
    fidelity: Fidelity
    tier: Tier = "object-storage"

    @property
    def is_in_checkpoints(self) -> bool:
        return self.fidelity != "omit" and self.tier == "object-storage"


@dataclass(frozen=True, slots=True)
class _Row:
    """``bounded``: what ``checkpoint.fidelity: bounded`` rounds."""

    pattern: str
    level: Level
    bounded: bool = False


_TABLE: Final = (
    _Row("model.*", "L1"),
    _Row("optim.*.exp_avg", "L2", bounded=True),
    _Row("optim.*.exp_avg_sq", "L2", bounded=True),
    # As programs without Ray like to call it.
    _Row("optimizer.*.exp_avg", "L2", bounded=True),
    _Row("optimizer.*.exp_avg_sq", "L2", bounded=True),
    _Row("*", "L1"),
)
_EXACT: Final = Treatment("L1", "lossless")


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelTable:
    """The built-in table with the Run's own rules before it."""

    rules: tuple[LevelRule, ...] = ()
    fidelity: Fidelity = "lossless"
    _known: dict[tuple[str, str], Treatment] = field(init=False, default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, config: CheckpointConfig) -> LevelTable:
        """The table that ``config`` describes."""
        return cls(rules=config.levels, fidelity=config.fidelity)

    def treatment(self, name: str, dtype: str) -> Treatment:
        """How the tensor ``name`` of a Checkpoint is kept. Anything that is not floating point is exact and L1."""
        known = self._known.get((name, dtype))
        if known is None:  # asked at every save for the same names: matching them costs more than the copy of a few
            known = self._known[name, dtype] = self._decided(name, dtype)
        return known

    def _decided(self, name: str, dtype: str) -> Treatment:
        if dtype not in _FLOATING:
            return _EXACT
        row = next(row for row in _TABLE if fnmatchcase(name, row.pattern))
        rule = next((rule for rule in self.rules if fnmatchcase(name, rule.pattern)), None)
        if rule is not None and rule.is_omission:
            return Treatment("L4", "omit")
        level = row.level if rule is None or rule.level is None else rule.level
        if rule is not None and rule.stays_in_memory and rule.level is None:
            level = "L3"
        asked = None if rule is None else rule.fidelity
        if asked is None:
            asked = self.fidelity if row.bounded and level == "L2" else "lossless"
        if asked == "bounded" and dtype != _ROUNDED:
            asked = "lossless"
        tier: Tier = "peer-memory" if rule is not None and rule.stays_in_memory else "object-storage"
        return Treatment(level, asked, tier)
