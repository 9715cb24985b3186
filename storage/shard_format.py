"""What writing and reading a Shard object share: chunks as captured, element widths, rows, the trailer.

Trailer (24 bytes, little endian): index length u64, format version u32, reserved u32, magic of 8 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from storage.manifest import Level

__all__ = ["MAGIC", "TRAILER", "TRAILER_BYTES", "RawChunk", "itemsize_of", "num_rows", "row_bytes"]

TRAILER: Final = struct.Struct("<QII8s")
TRAILER_BYTES: Final = TRAILER.size
MAGIC: Final = b"RAYSUME\n"

_ITEMSIZES: Final = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    "float8_e8m0fnu": 1,
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}


def itemsize_of(dtype: str) -> int:
    """Bytes of one element of a torch dtype by its name, e.g. ``bfloat16``. Raises ValueError for an unknown one."""
    itemsize = _ITEMSIZES.get(dtype)
    if itemsize is None:
        raise ValueError(f"dtype {dtype!r} is unknown; known are {', '.join(sorted(_ITEMSIZES))}")
    return itemsize


def num_rows(sizes: Sequence[int]) -> int:
    """Rows of a chunk along dimension 0. A 0-dim chunk is one row; a chunk without elements has none."""
    if 0 in sizes:
        return 0
    return sizes[0] if sizes else 1


def row_bytes(sizes: Sequence[int], itemsize: int) -> int:
    """Bytes of one row."""
    return prod(sizes[1:]) * itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class RawChunk:
    """One contiguous block of one tensor, row-major, as captured: what `write_shard` is given."""

    name: str
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    level: Level
    itemsize: int
    data: memoryview
