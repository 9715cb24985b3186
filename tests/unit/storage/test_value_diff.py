"""Comparing stored values without torch: any pair of shardings, any type; torch itself is the judge of the types."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from storage.commit_log import CommitLog
from storage.elements import float_values
from storage.errors import CorruptCheckpoint
from storage.memory_store import MemoryStore
from storage.value_diff import CheckpointValues, TensorDifference, compare_tensor
from tests.fakes.checkpoints import RUN, SaveParts, commit_parts, write_shards
from tests.fakes.layered_checkpoints import COLUMNS, LEVELS, ROWS, damage_tensor, layered_parts, layered_save, values_of

ONE_BYTE = ("bool", "uint8", "int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")


def values_in(parts: SaveParts) -> CheckpointValues:
    store = MemoryStore()
    write_shards(store, parts)
    commit = commit_parts(CommitLog(store, RUN), parts)
    return CheckpointValues(store, CommitLog(store, RUN).read_manifest(commit))


def compare(a: SaveParts, b: SaveParts, name: str = "model.w") -> TensorDifference:
    return compare_tensor(name, values_in(a), values_in(b))


@pytest.mark.parametrize("one", [(1, False), (3, False), (2, True), (5, True)])
@pytest.mark.parametrize("other", [(2, False), (7, False), (3, True)])
def test_the_same_values_are_equal_however_they_were_cut(one: tuple[int, bool], other: tuple[int, bool]) -> None:
    a = layered_parts(10, world_size=one[0], by_columns=one[1])
    b = layered_parts(10, world_size=other[0], by_columns=other[1])
    for name in LEVELS:
        found = compare(a, b, name)
        assert found.is_equal
        assert (found.num_elements, found.max_abs, found.relative_l2) == (ROWS * COLUMNS, 0.0, 0.0)


@pytest.mark.parametrize("by_columns", [False, True])
def test_differences_are_measured_as_numpy_does_on_whole_tensors(by_columns: bool) -> None:
    a, b = values_of(10), values_of(20)
    found = compare(layered_parts(10, world_size=3), layered_parts(20, world_size=2, by_columns=by_columns))
    distance = b["model.w"].astype(np.float64) - a["model.w"].astype(np.float64)
    assert found.max_abs == np.abs(distance).max()
    assert found.relative_l2 == pytest.approx(np.linalg.norm(distance) / np.linalg.norm(a["model.w"]), rel=1e-6)
    assert found.num_different == ROWS * COLUMNS


def test_one_changed_element_is_found_and_minus_zero_is_not_zero() -> None:
    values = values_of(10)
    values["model.w"][3, 4] += 1.0
    values["optim.w.exp_avg"][0, 0] = 0.0
    changed = {name: whole.copy() for name, whole in values.items()}
    changed["model.w"][3, 4] += 0.5
    changed["optim.w.exp_avg"][0, 0] = -0.0
    a, b = layered_parts(10, values=values), layered_parts(10, world_size=3, values=changed)
    found = compare(a, b)
    assert (found.num_different, found.max_abs) == (1, 0.5)
    zero = compare(a, b, "optim.w.exp_avg")
    assert (zero.num_different, zero.max_abs) == (1, 0.0)


def test_what_is_not_finite_is_counted_and_does_not_spoil_the_measures() -> None:
    values, other = values_of(10), values_of(10)
    values["model.w"][0, 0] = np.nan
    values["model.w"][0, 1] = other["model.w"][0, 1] = np.inf
    other["model.w"][5, 5] += 1.0
    found = compare(layered_parts(10, values=values), layered_parts(10, values=other))
    assert (found.num_different, found.num_not_finite) == (2, 1)
    assert found.max_abs == pytest.approx(1.0)


def test_a_tensor_that_changed_its_type_is_compared_by_value() -> None:
    values = {name: np.round(whole) for name, whole in values_of(10).items()}
    doubled = {name: whole.astype(np.float64) for name, whole in values.items()}
    found = compare(layered_parts(10, values=values), layered_parts(10, values=doubled))
    assert found.is_equal


def test_a_damaged_frame_is_an_error_that_names_its_object() -> None:
    store = MemoryStore()
    commit = layered_save(store, 10)
    key = damage_tensor(store, commit, "model.w", rank=1)
    sides = [CheckpointValues(store, CommitLog(store, RUN).read_manifest(commit)) for _ in range(2)]
    with pytest.raises(CorruptCheckpoint, match=key):
        compare_tensor("model.w", *sides)
    assert compare_tensor("optim.w.exp_avg", *sides).is_equal


@pytest.mark.parametrize("dtype", ONE_BYTE)
def test_every_code_of_a_one_byte_type_means_what_torch_says(dtype: str) -> None:
    codes = bytes(range(2 if dtype == "bool" else 256))
    said = torch.frombuffer(bytearray(codes), dtype=getattr(torch, dtype)).to(torch.float64).numpy()
    np.testing.assert_array_equal(float_values(codes, dtype), said)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_code_of_a_two_byte_float_means_what_torch_says(dtype: str) -> None:
    codes = np.arange(1 << 16, dtype="<u2").tobytes()
    said = torch.frombuffer(bytearray(codes), dtype=getattr(torch, dtype)).to(torch.float64).numpy()
    np.testing.assert_array_equal(float_values(codes, dtype), said)


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "int16", "uint16", "int32", "uint32", "int64", "uint64", "complex64", "complex128"]
)
def test_wider_types_mean_what_torch_says(dtype: str) -> None:
    tensor = torch.tensor([0, 1, 2, 100], dtype=getattr(torch, dtype))
    raw = tensor.view(torch.uint8).numpy().tobytes()
    np.testing.assert_array_equal(float_values(raw, dtype), [0, 1, 2, 100])


def test_an_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="int3"):
        float_values(b"\0", "int3")


def test_half_complex_and_powers_of_two() -> None:
    halves = np.array([1.5, -2.0, 0.25, 4.0], dtype="<f2").tobytes()
    np.testing.assert_array_equal(float_values(halves, "complex32"), [1.5 - 2.0j, 0.25 + 4.0j])
    np.testing.assert_array_equal(float_values(bytes([127, 128, 126]), "float8_e8m0fnu"), [1.0, 2.0, 0.5])
    assert np.isnan(float_values(bytes([255]), "float8_e8m0fnu")[0])


@pytest.mark.parametrize("size", [0, 700])
def test_a_shard_that_ends_too_early_is_damage_not_an_outage(size: int) -> None:
    values = values_in(layered_parts(10))
    key = values.manifest.shards[0].key
    values.store.put(key, values.store.get(key)[:size])
    with pytest.raises(CorruptCheckpoint, match=rf"{size} bytes, at least [0-9]+ were committed"):
        compare_tensor("model.w", values, values_in(layered_parts(20)))
