"""One figure of a bench beside its peer, the table of them and the JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Figure", "table", "write_json"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """``ratio`` is what the limit is for; below it is met, or above it where ``at_least`` is set.

    ``limit`` None: there is no target, the figure only informs.
    """

    name: str
    ours: str
    peer: str
    ratio: float
    limit: float | None
    at_least: bool = False

    @property
    def verdict(self) -> str:
        if self.limit is None:
            return "-"
        is_met = self.ratio >= self.limit if self.at_least else self.ratio <= self.limit
        return "met" if is_met else "MISSED"


def table(figures: Sequence[Figure]) -> str:
    """As text with aligned columns."""
    rows = [("figure", "ours", "peer", "ratio", "limit", "verdict")]
    for figure in figures:
        sign = ">=" if figure.at_least else "<="
        limit = "-" if figure.limit is None else f"{sign} {figure.limit:g}"
        rows.append((figure.name, figure.ours, figure.peer, f"{figure.ratio:.3g}", limit, figure.verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def write_json(path: Path, figures: Sequence[Figure]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([{**asdict(figure), "verdict": figure.verdict} for figure in figures], indent=1))
