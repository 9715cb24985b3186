"""Bytes to bytes: digests, and the lossless encodings of one frame.

Decoding is bounded: nothing larger than the size that the index promises is ever allocated, whatever the stored bytes
claim of themselves. Where the bytes come from, and what they mean, is not known here.
"""

from __future__ import annotations

from typing import Literal, assert_never

import numpy as np
import xxhash
import zstandard

from storage.decompress import Buffer, CodecError, decompressed
from storage.planes import decode_planes, encode_planes

__all__ = ["Buffer", "CodecError", "Encoding", "decode", "digest64", "digest128", "encode"]

Encoding = Literal["raw", "zstd", "shuffle-zstd", "planes-zstd"]


def digest64(data: Buffer) -> str:
    """xxh3_64 as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def digest128(data: Buffer) -> str:
    """xxh3_128 as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def encode(raw: Buffer, itemsize: int, encoding: Encoding, level: int) -> bytes:
    """The stored form of ``raw``, whose elements are ``itemsize`` bytes wide. ``level`` is zstd's."""
    match encoding:
        case "raw":
            return bytes(raw)
        case "zstd":
            return zstandard.ZstdCompressor(level=level).compress(raw)
        case "shuffle-zstd":
            return zstandard.ZstdCompressor(level=level).compress(_shuffled(raw, itemsize))
        case "planes-zstd":
            return encode_planes(raw, itemsize, level)
        case _:
            assert_never(encoding)


def decode(stored: Buffer, raw_bytes: int, itemsize: int, encoding: Encoding) -> bytes | memoryview:
    """The inverse of `encode`; of "raw" it is ``stored`` itself. Raises CodecError unless it is ``raw_bytes`` long."""
    match encoding:
        case "raw":
            if len(stored) != raw_bytes:
                raise CodecError(f"{len(stored)} stored bytes, expected {raw_bytes}")
            return stored if isinstance(stored, bytes | memoryview) else bytes(stored)
        case "zstd":
            return decompressed(stored, raw_bytes)
        case "shuffle-zstd":
            return _unshuffled(decompressed(stored, raw_bytes), itemsize)
        case "planes-zstd":
            return decode_planes(stored, raw_bytes, itemsize)
        case _:
            assert_never(encoding)


def _shuffled(raw: Buffer, itemsize: int) -> Buffer:
    """All first bytes of the elements, then all second bytes, and so on: exponents beside exponents compress."""
    if itemsize == 1:
        return raw
    elements = _elements(raw, itemsize)
    return np.ascontiguousarray(elements.T).reshape(-1).data


def _unshuffled(planes: bytes, itemsize: int) -> bytes | memoryview:
    if itemsize == 1:
        return planes
    return np.ascontiguousarray(_elements(planes, itemsize).reshape(itemsize, -1).T).reshape(-1).data


def _elements(raw: Buffer, itemsize: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    flat = np.frombuffer(raw, dtype=np.uint8)
    if itemsize < 1 or flat.size % itemsize:
        raise CodecError(f"{flat.size} bytes are not a whole number of {itemsize}-byte elements")
    return flat.reshape(-1, itemsize)
