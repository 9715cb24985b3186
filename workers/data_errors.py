"""Errors of preparing and reading token data: each names the file, the place in it, and what to do.

They survive pickling: every field is a constructor argument kept in ``args``.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DataError", "DatasetChanged", "FieldChange"]


class DataError(Exception):
    """Data cannot be used as it is. ``row`` counts from 1 for lines of text and JSONL, from 0 for rows of Parquet."""

    def __init__(self, reason: str, file: str | None = None, row: int | None = None, row_group: int | None = None):
        super().__init__(reason, file, row, row_group)
        self.reason, self.file, self.row, self.row_group = reason, file, row, row_group

    def __str__(self) -> str:
        parts = [self.file] if self.file is not None else []
        if self.row_group is not None:
            parts.append(f"row group {self.row_group}")
        if self.row is not None:
            parts.append(f"row {self.row}")
        return f"data: {', '.join(parts)}: {self.reason}" if parts else f"data: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldChange:
    """One field of the data's identity that differs between the Checkpoint and now."""

    field: str
    saved: object
    now: object

    def __str__(self) -> str:
        return f"{self.field} (saved {self.saved}, now {self.now})"


class DatasetChanged(DataError):
    """The data is not what the Checkpoint was trained on, so its position would point at other rows."""

    def __init__(self, changes: tuple[FieldChange, ...]):
        self.changes = changes
        super().__init__(
            f"changed since the Checkpoint: {'; '.join(map(str, changes))}. The saved position would point at other "
            "rows. Put the data back as it was, or set data.allow_changed=true to go on with the new data"
        )
        self.args = (changes,)
