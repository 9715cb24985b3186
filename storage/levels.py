"""Which field of the training state is kept at which Level. One table; the first pattern that matches decides.

L1 is lossless and the default, so a field nobody thought of is never rounded.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from storage.manifest import Level

__all__ = ["level_of"]

_FLOATING = ("float16", "bfloat16", "float32", "float64")

_TABLE: tuple[tuple[str, Level], ...] = (
    ("model.*", "L1"),
    ("optim.*.exp_avg", "L2"),
    ("optim.*.exp_avg_sq", "L2"),
    ("*", "L1"),
)


def level_of(name: str, dtype: str) -> Level:
    """The Level of the tensor called ``name`` in a Checkpoint. Anything that is not floating point is L1."""
    if dtype not in _FLOATING:
        return "L1"
    return next(level for pattern, level in _TABLE if fnmatchcase(name, pattern))
