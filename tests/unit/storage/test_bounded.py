"""Moments rounded within a bound: what the stored bytes decode to against what was captured, compared in fp64 here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from storage import shard_writer
from storage.bounded import choose_rounding, round_mantissa
from storage.codec import Buffer, CodecError, Encoding, encode
from storage.config import CheckpointConfig
from storage.frames import EncodedShard, RawChunk, encode_shard, num_rows, read_rows
from storage.keys import Attempt

ATTEMPT = Attempt(number=3, nonce="0123abcd")
BOUND = 1e-3
TINY = 1e-45
Array = NDArray[np.float32]


def shard_of(arrays: dict[str, NDArray[np.generic]], **settings: object) -> EncodedShard:
    config = CheckpointConfig.model_validate({"fidelity": "bounded", "moment_bound": BOUND, **settings})
    chunks = [
        RawChunk(
            name=name,
            dtype=str(array.dtype),
            offsets=(0,) * array.ndim,
            sizes=array.shape,
            level="L1",
            itemsize=array.itemsize,
            data=memoryview(array.tobytes()),
        )
        for name, array in arrays.items()
    ]
    return encode_shard(chunks, step=7, attempt=ATTEMPT, rank=2, config=config)


def decoded(shard: EncodedShard) -> dict[str, NDArray[np.generic]]:
    content = bytes(shard.data)
    return {
        chunk.name: np.frombuffer(
            read_rows(
                chunk, 0, num_rows(chunk.sizes), lambda start, size: content[start : start + size], step=7, key="k"
            ),
            chunk.dtype,
        ).reshape(chunk.sizes)
        for chunk in shard.index.chunks
    }


def moments(m: Array, v: Array) -> dict[str, NDArray[np.generic]]:
    return {"optim.w.exp_avg": m, "optim.w.exp_avg_sq": v}


def saved(m: Array, v: Array, **settings: object) -> tuple[Array, Array, EncodedShard]:
    shard = shard_of(moments(m, v), **settings)
    back = decoded(shard)
    return back["optim.w.exp_avg"].astype(np.float32), back["optim.w.exp_avg_sq"].astype(np.float32), shard


def update(m: Array, v: Array, eps: float) -> NDArray[np.float64]:
    root = np.sqrt(v.astype(np.float64)) + eps
    return np.divide(m.astype(np.float64), root, out=np.zeros(m.shape), where=root > 0)


def worst_error(m: Array, v: Array, m_back: Array, v_back: Array) -> float:
    errors = [0.0]
    for eps in (0.0, 1e-8):
        exact = update(m, v, eps)
        norm = np.linalg.norm(exact)
        if norm:
            errors.append(float(np.linalg.norm(update(m_back, v_back, eps) - exact) / norm))
    return max(errors)


def assert_kept_in_kind(exact: Array, back: Array) -> None:
    assert np.array_equal(np.signbit(exact), np.signbit(back))
    assert np.array_equal(exact == 0, back == 0)
    assert np.isfinite(back).all()


def training_moments(num: int = 40_000, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(-9, 2, num))
    v = (scale * scale * rng.gamma(2.0, 0.5, num)).astype(np.float32)
    return (rng.normal(0, 0.2, num) * scale).astype(np.float32), v


def test_the_small_second_moments_that_fp16_loses_survive_with_the_update_they_give() -> None:
    """B31: m = 1e-5, v = 1e-10; through fp16 the first update is 0.90122 in place of 0.00089953."""
    m, v = np.full(64, 1e-5, np.float32), np.full(64, 1e-10, np.float32)
    m_back, v_back, _ = saved(m, v)
    assert_kept_in_kind(v, v_back)

    def first_update(m: Array, v: Array) -> NDArray[np.float64]:
        return 1e-3 * 0.9 * m.astype(np.float64) / (np.sqrt(0.999 * v.astype(np.float64)) + 1e-8)

    right = 1e-3 * 0.9 * 1e-5 / (np.sqrt(0.999e-10) + 1e-8)
    assert first_update(m_back, v_back) == pytest.approx(right, rel=0.01)
    fp16 = first_update(m, v.astype(np.float16).astype(np.float32))
    assert (fp16 > 500 * right).all()


def test_moments_of_a_training_run_shrink_a_lot_and_keep_the_bound() -> None:
    m, v = training_moments()
    m_back, v_back, shard = saved(m, v)
    assert 0 < worst_error(m, v, m_back, v_back) <= BOUND
    assert_kept_in_kind(m, m_back)
    assert_kept_in_kind(v, v_back)
    assert shard.size < 0.5 * (m.nbytes + v.nbytes)
    assert shard.lossless_fallbacks == 0
    for chunk in shard.index.chunks:
        assert chunk.bound == BOUND
        assert chunk.mantissa_bits is not None
        assert chunk.update_error == pytest.approx(worst_error(m, v, m_back, v_back), rel=1e-6)


def test_an_encoder_that_stores_other_values_is_found_before_they_are_called_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def encode_wrong(raw: Buffer, itemsize: int, encoding: Encoding, level: int) -> bytes:
        return encode(bytes(raw)[::-1], itemsize, encoding, level)

    m, v = training_moments()
    monkeypatch.setattr(shard_writer, "encode", encode_wrong)
    with pytest.raises(CodecError, match="do not decode to what was encoded"):
        shard_of(moments(m, v))


@pytest.mark.parametrize("bound", [1e-1, 1e-2, 1e-4, 1e-5])
def test_any_bound_is_kept_and_a_wider_one_costs_less(bound: float) -> None:
    m, v = training_moments()
    m_back, v_back, shard = saved(m, v, moment_bound=bound)
    assert worst_error(m, v, m_back, v_back) <= bound
    assert shard.lossless_fallbacks == 0
    tighter = shard_of(moments(m, v), moment_bound=bound / 4)
    assert shard.size < tighter.size


def test_a_bound_that_no_rounding_keeps_means_lossless_and_is_counted() -> None:
    m, v = training_moments(1000)
    m_back, v_back, shard = saved(m, v, moment_bound=1e-8)
    assert np.array_equal(m_back, m)
    assert np.array_equal(v_back, v)
    assert shard.lossless_fallbacks == 2
    assert all(chunk.bound is None and chunk.mantissa_bits is None for chunk in shard.index.chunks)


@pytest.mark.parametrize("spoiler", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", ["m", "v"])
def test_what_is_not_finite_is_kept_bit_for_bit_and_counted(spoiler: float, place: str) -> None:
    m, v = training_moments(1000)
    (m if place == "m" else v)[17] = spoiler
    m_back, v_back, shard = saved(m, v)
    assert m_back.tobytes() == m.tobytes()
    assert v_back.tobytes() == v.tobytes()
    assert shard.lossless_fallbacks == 2


def test_a_negative_second_moment_is_kept_bit_for_bit_and_counted() -> None:
    m, v = training_moments(1000)
    v[3] = -v[3]
    m_back, v_back, shard = saved(m, v)
    assert (m_back.tobytes(), v_back.tobytes(), shard.lossless_fallbacks) == (m.tobytes(), v.tobytes(), 2)


def test_subnormal_zero_and_largest_numbers_keep_their_value() -> None:
    """Moments of rows that are never seen decay to subnormal numbers and stay there."""
    m, v = training_moments(4000)
    m[:6] = [TINY, -TINY, 0.0, -0.0, 1e-39, -1e-40]
    v[:6] = [TINY, 1e-40, 0.0, 1e-30, 0.0, TINY]
    m[6], v[7] = np.finfo(np.float32).max, np.finfo(np.float32).max
    m_back, v_back, shard = saved(m, v)
    assert m_back[:7].tobytes() == m[:7].tobytes()
    assert v_back[[0, 1, 2, 4, 5, 7]].tobytes() == v[[0, 1, 2, 4, 5, 7]].tobytes()
    assert_kept_in_kind(m, m_back)
    assert_kept_in_kind(v, v_back)
    assert shard.lossless_fallbacks == 0


def test_an_outlier_does_not_hide_the_error_of_the_others() -> None:
    """The norm of the update is one element's; every other one is still within the rounding of its own bits."""
    m, v = training_moments(4000)
    m[0], v[0] = 1e3, 1e-12
    m_back, v_back, _ = saved(m, v)
    exact, back = update(m, v, 1e-8)[1:], update(m_back, v_back, 1e-8)[1:]
    assert (np.abs(back - exact) <= 4e-3 * np.abs(exact)).all()


numbers = st.one_of(
    st.floats(width=32, allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 3.4028235e38, -3.4028235e38, 1e-30, 1.0]),
)


@settings(deadline=None)
@given(
    m=st.lists(numbers, min_size=1, max_size=60),
    v=st.lists(numbers, min_size=1, max_size=60),
    bound=st.floats(1e-7, 0.1),
    is_training=st.booleans(),
)
def test_the_bound_holds_or_the_bytes_are_exact_whatever_is_saved(
    m: list[float], v: list[float], bound: float, is_training: bool
) -> None:
    num = min(len(m), len(v))
    first, second = np.array(m[:num], np.float32), np.array(v[:num], np.float32)
    if is_training:
        second = np.abs(second)
    m_back, v_back, shard = saved(first, second, moment_bound=bound)
    if shard.index.chunks[0].bound is None:
        assert shard.lossless_fallbacks == 2
        assert (m_back.tobytes(), v_back.tobytes()) == (first.tobytes(), second.tobytes())
        return
    assert worst_error(first, second, m_back, v_back) <= bound * (1 + 1e-9)
    assert_kept_in_kind(first, m_back)
    assert_kept_in_kind(second, v_back)


@settings(deadline=None)
@given(words=st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=50), bits=st.integers(1, 22))
def test_rounding_goes_to_the_nearest_and_is_idempotent(words: list[int], bits: int) -> None:
    exact = np.array(words, np.uint32)
    rounded = round_mantissa(exact, bits)
    assert np.array_equal(round_mantissa(rounded, bits), rounded)
    value, back = exact.view(np.float32).astype(np.float64), rounded.view(np.float32).astype(np.float64)
    is_normal = np.isfinite(value) & (np.abs(value) >= 1.17549435e-38) & (rounded != exact)
    value, back = value[is_normal], back[is_normal]
    assert (np.abs(back - value) <= 2.0 ** -(bits + 1) * np.abs(value)).all()
    assert exact.tolist() == words


def test_a_number_half_way_between_two_goes_to_the_even_one() -> None:
    exact = np.array([1 + 1 / 16, 1 + 3 / 16, -(1 + 1 / 16), -(1 + 3 / 16)], np.float32).view(np.uint32)
    assert round_mantissa(exact, 3).view(np.float32).tolist() == [1.0, 1.25, -1.0, -1.25]


def test_nothing_but_the_fp32_moments_is_rounded() -> None:
    rng = np.random.default_rng(0)
    m, v = training_moments(512)
    arrays: dict[str, NDArray[np.generic]] = {
        **moments(m, v),
        "model.w": rng.normal(0, 1, 512).astype(np.float32),
        "optim.w.step": np.array(123457.0, np.float32),
        "optim.h.exp_avg": rng.normal(0, 1, 512).astype(np.float16),
        "optim.h.exp_avg_sq": np.abs(rng.normal(0, 1, 512)).astype(np.float16),
        "optim.i.exp_avg": rng.integers(0, 1 << 30, 512).astype(np.int32),
        "optim.i.exp_avg_sq": rng.integers(0, 1 << 30, 512).astype(np.int64),
        "model.count": np.array((1 << 53) + 1, np.int64),
        "rng.cpu": rng.integers(0, 256, 5056).astype(np.uint8),
    }
    shard = shard_of(arrays)
    back = decoded(shard)
    rounded = {name for name, array in arrays.items() if back[name].tobytes() != array.tobytes()}
    assert rounded == {"optim.w.exp_avg", "optim.w.exp_avg_sq"}
    assert {chunk.name for chunk in shard.index.chunks if chunk.bound is not None} == rounded
    assert shard.lossless_fallbacks == 0


@pytest.mark.parametrize("alone", ["exp_avg", "exp_avg_sq"])
def test_a_moment_without_its_partner_is_kept_exactly_and_counted(alone: str) -> None:
    m, _ = training_moments(512)
    shard = shard_of({f"optim.w.{alone}": m, "optim.other.exp_avg": m, "optim.other.exp_avg_sq": m[:256]})
    assert all(chunk.bound is None for chunk in shard.index.chunks)
    assert decoded(shard)[f"optim.w.{alone}"].tobytes() == m.tobytes()
    assert shard.lossless_fallbacks == 3


def test_a_moment_whose_partner_is_of_another_type_is_kept_exactly_and_counted() -> None:
    m, v = training_moments(512)
    shard = shard_of({"optim.w.exp_avg": m, "optim.w.exp_avg_sq": v.astype(np.float16)})
    assert decoded(shard)["optim.w.exp_avg"].tobytes() == m.tobytes()
    assert shard.lossless_fallbacks == 1


@pytest.mark.parametrize("exact", ["exp_avg", "exp_avg_sq"])
def test_a_rule_keeps_one_moment_exact_and_the_other_within_the_bound(exact: str) -> None:
    m, v = training_moments(2048)
    m_back, v_back, shard = saved(m, v, levels=[{"pattern": f"optim.*.{exact}", "fidelity": "lossless"}])
    assert (m_back.tobytes() == m.tobytes()) == (exact == "exp_avg")
    assert (v_back.tobytes() == v.tobytes()) == (exact == "exp_avg_sq")
    error = worst_error(m, v, m_back, v_back)
    assert 0 < error <= BOUND
    (rounded,) = [chunk for chunk in shard.index.chunks if chunk.bound is not None]
    assert rounded.name != f"optim.w.{exact}"
    assert rounded.update_error == pytest.approx(error, rel=1e-6)


def test_lossless_is_the_default_and_leaves_the_same_moments_exact() -> None:
    m, v = training_moments(2048)
    m_back, v_back, shard = saved(m, v, fidelity="lossless")
    assert (m_back.tobytes(), v_back.tobytes(), shard.lossless_fallbacks) == (m.tobytes(), v.tobytes(), 0)


def test_a_large_pair_is_rounded_alike_with_and_without_threads() -> None:
    m, v = training_moments(700_000)
    arrays = {name: array.reshape(-1, 100) for name, array in moments(m, v).items()}
    config = CheckpointConfig(fidelity="bounded", frame_bytes=1 << 16)
    chunks = [
        RawChunk(name=name, dtype="float32", offsets=(0, 0), sizes=a.shape, level="L2", itemsize=4, data=a.data)
        for name, a in arrays.items()
    ]
    alone = encode_shard(chunks, step=7, attempt=ATTEMPT, rank=2, config=config)
    with ThreadPoolExecutor(3) as pool:
        together = encode_shard(chunks, step=7, attempt=ATTEMPT, rank=2, config=config, pool=pool)
    assert alone.record("k") == together.record("k")
    assert all(chunk.bound == config.moment_bound for chunk in alone.index.chunks)


def test_the_cheapest_widths_that_keep_the_bound_are_chosen() -> None:
    m, v = training_moments()
    words = m.view(np.uint32), v.view(np.uint32)
    usual = choose_rounding(*words, bound=1e-3)
    assert usual is not None
    assert (usual.exp_avg_bits, usual.exp_avg_sq_bits) == (9, 7)
    only = choose_rounding(*words, bound=1e-3, round_exp_avg=False)
    assert only is not None
    assert (only.exp_avg_bits, only.exp_avg_sq_bits) == (None, 7)
    assert choose_rounding(*words, bound=1e-3, round_exp_avg=False, round_exp_avg_sq=False) is None
