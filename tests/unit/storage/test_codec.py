"""Round trips of every encoding, and stored bytes that lie about themselves."""

from __future__ import annotations

import os

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from storage.codec import CodecError, Encoding, decode, digest64, digest128, encode

ENCODINGS: tuple[Encoding, ...] = ("raw", "zstd", "shuffle-zstd")


@given(
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
    elements=st.integers(0, 300),
    encoding=st.sampled_from(ENCODINGS),
    level=st.sampled_from([-5, 1, 3]),
    data=st.data(),
)
def test_decoding_gives_the_bytes_that_were_encoded(
    itemsize: int, elements: int, encoding: Encoding, level: int, data: st.DataObject
) -> None:
    raw = data.draw(st.binary(min_size=itemsize * elements, max_size=itemsize * elements))
    stored = encode(memoryview(raw), itemsize, encoding, level)
    assert bytes(decode(stored, len(raw), itemsize, encoding)) == raw


def test_shuffling_makes_floating_point_numbers_smaller() -> None:
    raw = np.random.default_rng(0).normal(0, 0.02, 100_000).astype(np.float32).tobytes()
    assert len(encode(raw, 4, "shuffle-zstd", 1)) < 0.9 * len(raw)
    assert len(encode(raw, 4, "shuffle-zstd", 1)) < len(encode(raw, 4, "zstd", 1))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("promised", [0, 92, 100, 1 << 40])
def test_a_wrong_promise_of_size_is_refused(encoding: Encoding, promised: int) -> None:
    stored = encode(os.urandom(96), 4, encoding, 1)
    with pytest.raises(CodecError, match="expected"):
        decode(stored, promised, 4, encoding)


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    stored = encode(bytes(64 << 20), 1, "zstd", 1)
    assert len(stored) < 1 << 16
    with pytest.raises(CodecError, match="claim"):
        decode(stored, 1024, 1, "zstd")


def test_a_frame_without_a_stated_size_is_refused() -> None:
    stored = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
    with pytest.raises(CodecError):
        decode(stored, 1000, 1, "zstd")


@pytest.mark.parametrize("damage", [lambda s: s[:-3], lambda s: s + b"x", lambda s: b"junk" + s[4:], lambda _: b""])
def test_damaged_bytes_are_refused(damage: object) -> None:
    stored = encode(bytes(1000), 4, "shuffle-zstd", 1)
    with pytest.raises(CodecError):
        decode(damage(stored), 1000, 4, "shuffle-zstd")  # type: ignore[operator]


def test_half_an_element_is_refused() -> None:
    with pytest.raises(CodecError, match="whole number"):
        encode(bytes(10), 4, "shuffle-zstd", 1)


def test_digests_have_the_widths_of_the_records() -> None:
    assert digest64(b"") == "2d06800538d394c2"
    assert digest128(memoryview(b"")) == "99aa06d3014798d86001c324468d497f"
    assert len(digest64(b"x")) == 16
    assert len(digest128(b"x")) == 32
