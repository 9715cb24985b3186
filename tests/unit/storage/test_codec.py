"""Round trips of every encoding, and stored bytes that lie about themselves."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.codec import CodecError, Encoding, decode, digest64, digest128, encode

ENCODINGS: tuple[Encoding, ...] = ("raw", "zstd", "shuffle-zstd", "planes-zstd")
WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@settings(deadline=None)
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


@settings(deadline=None)
@given(
    itemsize=st.sampled_from(sorted(WIDTHS)),
    elements=st.integers(60, 3000),
    encoding=st.sampled_from(ENCODINGS),
    level=st.sampled_from([-5, 1, 2, 3, 19]),
    seed=st.integers(0, 1 << 30),
    shape=st.sampled_from(["noise", "constant", "one bit", "runs", "normal", "nan payloads"]),
)
def test_numbers_of_every_shape_come_back_bit_for_bit(
    itemsize: int, elements: int, encoding: Encoding, level: int, seed: int, shape: str
) -> None:
    raw = numbers(shape, elements * itemsize, itemsize, np.random.default_rng(seed))
    assert bytes(decode(encode(memoryview(raw), itemsize, encoding, level), len(raw), itemsize, encoding)) == raw


def numbers(shape: str, num_bytes: int, itemsize: int, rng: np.random.Generator) -> bytes:
    noise: Any = rng.integers(0, 256, num_bytes, np.uint8).view(WIDTHS[itemsize])
    match shape:
        case "constant":
            return bytes(noise[:1].tobytes() * noise.size)
        case "one bit":
            return bytes((noise[0] & ~noise.dtype.type(4) | ((noise & 1) << 2)).astype(noise.dtype).tobytes())
        case "runs":
            return np.sort(noise).tobytes()
        case "normal":
            return rng.normal(0, 1e-3, num_bytes // 4 + 1).astype(np.float32).tobytes()[:num_bytes]
        case "nan payloads":
            return bytes((noise | (noise.dtype.type(0xFF) << noise.dtype.type(8 * itemsize - 8))).tobytes())
        case _:
            return bytes(noise.tobytes())


def test_encoding_leaves_its_input_alone() -> None:
    for itemsize in (1, 2, 4, 8, 16):
        raw = bytearray(np.random.default_rng(0).normal(0, 1, 4096).astype(np.float32).tobytes())
        before = bytes(raw)
        encode(memoryview(raw), itemsize, "planes-zstd", 1)
        assert bytes(raw) == before


def test_planes_make_floating_point_numbers_smaller_than_shuffling_does() -> None:
    rng = np.random.default_rng(0)
    spread = rng.normal(0, 1, (512, 512)) * np.exp(rng.normal(-9, 3, (512, 1)))
    raw = spread.astype(np.float32).tobytes()
    assert len(encode(raw, 4, "planes-zstd", 1)) < 0.97 * len(encode(raw, 4, "shuffle-zstd", 1))


def test_a_higher_level_never_makes_planes_larger() -> None:
    rng = np.random.default_rng(0)
    for raw in (rng.normal(0, 1, 1 << 16).astype(np.float32), np.arange(1 << 16, dtype=np.int32)):
        sizes = [len(encode(raw.tobytes(), 4, "planes-zstd", level)) for level in (1, 3, 9, 19)]
        assert max(sizes) == sizes[0]


def test_a_plane_of_one_changing_bit_takes_one_bit_a_number() -> None:
    signs = np.where(np.random.default_rng(0).random(1 << 16) < 0.5, -1.0, 1.0).astype(np.float32)
    assert len(encode(signs.tobytes(), 4, "planes-zstd", 1)) < (1 << 13) + 64


@pytest.mark.parametrize("itemsize", sorted(WIDTHS))
def test_a_single_changing_bit_comes_back_wherever_it_is(itemsize: int) -> None:
    rng = np.random.default_rng(0)
    for bit in range(8 * itemsize):
        words: Any = rng.integers(0, 2, 300).astype(WIDTHS[itemsize]) << WIDTHS[itemsize](bit)
        raw = words.tobytes()
        assert bytes(decode(encode(raw, itemsize, "planes-zstd", 1), len(raw), itemsize, "planes-zstd")) == raw


@settings(deadline=None)
@given(position=st.integers(0, 1 << 20), value=st.integers(0, 255), cut=st.integers(0, 40))
def test_planes_that_lie_about_themselves_never_decode_to_another_size(position: int, value: int, cut: int) -> None:
    raw = np.random.default_rng(0).normal(0, 1, 600).astype(np.float32).tobytes()
    stored = bytearray(encode(raw, 4, "planes-zstd", 1))
    stored[position % 60] = value
    del stored[len(stored) - cut :]
    try:
        decoded = decode(stored, len(raw), 4, "planes-zstd")
    except CodecError:
        return
    assert len(decoded) == len(raw)


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
    for encoding in ("shuffle-zstd", "planes-zstd"):
        stored = encode(np.arange(250, dtype=np.uint32).tobytes(), 4, encoding, 1)
        with pytest.raises(CodecError):
            decode(damage(stored), 1000, 4, encoding)  # type: ignore[operator]


def test_half_an_element_is_refused() -> None:
    with pytest.raises(CodecError, match="whole number"):
        encode(bytes(10), 4, "shuffle-zstd", 1)
    with pytest.raises(CodecError, match="whole number"):
        encode(bytes(1022), 4, "planes-zstd", 1)


def test_digests_have_the_widths_of_the_records() -> None:
    assert digest64(b"") == "2d06800538d394c2"
    assert digest128(memoryview(b"")) == "99aa06d3014798d86001c324468d497f"
    assert len(digest64(b"x")) == 16
    assert len(digest128(b"x")) == 32
