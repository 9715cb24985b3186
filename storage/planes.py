"""The ``planes-zstd`` encoding: the bytes of floating point numbers sorted by what they mean, each kind in its own way.

Numbers are turned left by one bit, so that an exponent is a byte of its own and the sign the lowest bit. All first
bytes, all second bytes and so on become planes. Of the exponents, each run of 256 gives up its mean. A plane is then
stored as the one byte it repeats, as one bit a number, compressed, or as it is. Any bytes come back exactly.

Layout: one byte of mode; of mode 1, method (u8) and length (u32) of the run means and of every plane, then their bytes.
Decoding allocates no more than the promised size, whatever the stored bytes claim.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from storage.decompress import Buffer, CodecError, decompressed

__all__ = ["decode_planes", "encode_planes"]

Bytes = NDArray[np.uint8]

_VERBATIM: Final = b"\x00"
_PLANES: Final = b"\x01"
_RAW, _CONSTANT, _BIT, _ZSTD = range(4)
_ENTRY: Final = struct.Struct("<BI")
_RUN: Final = 256
_SMALLEST: Final = 256
_WORDS: Final[dict[int, np.dtype[np.unsignedinteger[Any]]]] = {
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}
_TUNED_UP_TO: Final = 2


def encode_planes(raw: Buffer, itemsize: int, level: int) -> bytes:
    """``raw`` as planes, or verbatim where it is small or does not shrink.

    Every ``level`` of zstd up to 2 gives the same; a higher one is tried besides, and the smaller result taken.
    """
    flat = np.frombuffer(raw, np.uint8)
    if itemsize < 1 or flat.size % itemsize:
        raise CodecError(f"{flat.size} bytes are not a whole number of {itemsize}-byte elements")
    if flat.size < _SMALLEST:
        return _VERBATIM + flat.tobytes()
    planes = np.array(_turned(flat, itemsize, 1).reshape(-1, itemsize).T, order="C")  # a copy: it is changed below
    means = _take_means(planes[-1]) if itemsize in _WORDS else planes[0, :0]
    parts = [_encode_plane(plane, level) for plane in (means, *planes)]
    head = b"".join(_ENTRY.pack(method, len(data)) for method, data in parts)
    stored = b"".join((_PLANES, head, *(data for _, data in parts)))
    return stored if len(stored) <= flat.size else _VERBATIM + flat.tobytes()


def decode_planes(stored: Buffer, raw_bytes: int, itemsize: int) -> memoryview:
    """The inverse of `encode_planes`. Raises CodecError unless the result is exactly ``raw_bytes`` long."""
    content = memoryview(stored).cast("B")
    mode, content = bytes(content[:1]), content[1:]
    if mode == _VERBATIM:
        if len(content) != raw_bytes:
            raise CodecError(f"{len(content)} stored bytes, expected {raw_bytes}")
        return memoryview(bytes(content))
    if mode != _PLANES or raw_bytes % itemsize:
        raise CodecError(f"mode {mode.hex()!r} with {raw_bytes} bytes of {itemsize}-byte elements, expected 00 or 01")
    num_elements = raw_bytes // itemsize
    sizes = (num_elements // _RUN if itemsize in _WORDS else 0, *[num_elements] * itemsize)
    parts = _split(content, sizes)
    planes = np.empty((num_elements, itemsize), np.uint8)
    for number, (method, data) in enumerate(parts[1:]):
        planes[:, number] = _decode_plane(method, data, num_elements)
    _add_means(planes[:, -1], _decode_plane(*parts[0], sizes[0]))
    return _turned(planes.reshape(-1), itemsize, -1).data.cast("B")


def _turned(flat: Bytes, itemsize: int, bits: int) -> Bytes:
    """Every element rotated by one bit: left for 1, right for -1. Widths without a word type stay as they are."""
    dtype = _WORDS.get(itemsize)
    if dtype is None:
        return flat
    words, one, rest = flat.view(dtype), dtype.type(1), dtype.type(8 * itemsize - 1)
    turned = (words << one) | (words >> rest) if bits > 0 else (words >> one) | (words << rest)
    return np.asarray(turned).view(np.uint8)


def _take_means(exponents: Bytes) -> Bytes:
    """Subtract from each whole run its mean, in place and modulo 256; the means."""
    runs = exponents[: exponents.size // _RUN * _RUN].reshape(-1, _RUN)
    means: Bytes = (runs.sum(axis=1, dtype=np.uint32) // _RUN).astype(np.uint8)
    runs -= means[:, None]
    return means


def _add_means(exponents: Bytes, means: Bytes) -> None:
    whole = exponents[: means.size * _RUN]
    whole += np.repeat(means, _RUN)


def _encode_plane(plane: Bytes, level: int) -> tuple[int, bytes]:
    if not plane.size:
        return _RAW, b""
    low, high = int(np.bitwise_and.reduce(plane)), int(np.bitwise_or.reduce(plane))
    varying = low ^ high
    if not varying:
        return _CONSTANT, bytes([low])
    if varying & (varying - 1) == 0:
        # A single bit that varies, as a sign does: zstd would find chance repetitions and need more than one bit.
        return _BIT, bytes([low, varying]) + np.packbits(plane != low).tobytes()
    compressed = zstandard.ZstdCompressor(compression_params=_tuned()).compress(plane.data)
    if level > _TUNED_UP_TO:
        compressed = min(compressed, zstandard.ZstdCompressor(level=level).compress(plane.data), key=len)
    return (_ZSTD, compressed) if len(compressed) < plane.size else (_RAW, plane.tobytes())


def _decode_plane(method: int, data: memoryview, size: int) -> Bytes:
    if method == _ZSTD:
        return np.frombuffer(decompressed(data, size), np.uint8)
    if method == _RAW and len(data) == size:
        return np.frombuffer(data, np.uint8)
    if method == _CONSTANT and len(data) == 1:
        return np.full(size, data[0], np.uint8)
    if method == _BIT and len(data) == 2 + (size + 7) // 8:
        bits: Bytes = np.unpackbits(np.frombuffer(data[2:], np.uint8), count=size)
        return bits * np.uint8(data[1]) + np.uint8(data[0])
    raise CodecError(f"a plane of method {method} has {len(data)} bytes, expected those of {size} numbers")


def _split(content: memoryview, sizes: Sequence[int]) -> list[tuple[int, memoryview]]:
    """Method and bytes of every part, which must fill ``content`` exactly."""
    position = _ENTRY.size * len(sizes)
    if len(content) < position:
        raise CodecError(f"{len(content)} stored bytes, expected at least {position}")
    parts: list[tuple[int, memoryview]] = []
    for number in range(len(sizes)):
        method, length = _ENTRY.unpack_from(content, _ENTRY.size * number)
        parts.append((method, content[position : position + length]))
        position += length
    if position != len(content):
        raise CodecError(f"the parts need {position} stored bytes, expected {len(content)}")
    return parts


@cache
def _tuned() -> zstandard.ZstdCompressionParameters:
    # Planes hold few true repetitions: looking for short ones costs time and bytes, where entropy coding does it all.
    return zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6)
