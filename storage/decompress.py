"""Bounded zstd decompression: nothing larger than what was promised is ever allocated, whatever the bytes claim."""

from __future__ import annotations

import zstandard

__all__ = ["Buffer", "CodecError", "decompressed"]

Buffer = bytes | bytearray | memoryview

_LARGEST_RATIO = 1 << 15  # zstd's own: a block of 128 KiB takes at least 4 bytes


class CodecError(ValueError):
    """Stored bytes do not decode to exactly what was promised."""


def decompressed(stored: Buffer, raw_bytes: int) -> bytes:
    """The one zstd frame in ``stored``. Raises CodecError unless it holds exactly ``raw_bytes``."""
    try:
        # zstd allocates what the stored header claims, so the claim is checked first.
        claimed = zstandard.get_frame_parameters(stored).content_size
        if claimed != raw_bytes:
            raise CodecError(f"stored bytes claim to hold {claimed} bytes, expected {raw_bytes}")
        if raw_bytes > len(stored) * _LARGEST_RATIO:
            raise CodecError(f"{len(stored)} stored bytes cannot hold {raw_bytes} bytes")
        raw = zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"not decodable: {error}") from error
    if len(raw) != raw_bytes:
        raise CodecError(f"decoded to {len(raw)} bytes, expected {raw_bytes}")
    return raw
