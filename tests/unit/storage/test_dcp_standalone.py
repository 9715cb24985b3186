"""Saving and loading through torch.distributed.checkpoint in one process, without Ray; the stores are real."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from storage import RaysumeReader, RaysumeWriter, dcp_lineage
from storage.commit_log import CommitLog
from storage.config import StoreConfig
from storage.dcp_lineage import Lineage
from storage.dcp_standalone import load, own_errors
from storage.errors import CommitRefused, CorruptCheckpoint, ManifestMismatch, ObjectMissing, StorageError
from storage.keys import JOURNAL
from storage.local_store import LocalStore
from storage.plain_values import NotPlainValue
from storage.verify import verify_commit

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:The given buffer is not writable"
)

State = dict[str, Any]


def state(value: float = 1.0) -> State:
    return {
        "model": {"w": torch.full((40, 3), value), "b": torch.full((), value), "none": torch.zeros(0, 4)},
        "optim": {
            "state": {0: {"exp_avg": torch.full((40, 3), value, dtype=torch.bfloat16), "step": torch.tensor(value)}},
            "param_groups": [{"lr": 0.1 * value, "betas": (0.9, 0.95), "params": [0], "name": None}],
        },
        "step": int(value),
        "best": float("inf"),
        "flags": torch.tensor([True, False]),
    }


def save(url: Path | str, step: int, what: State | None = None, **options: Any) -> None:
    with own_errors("save"):
        dcp.save(what or state(step), storage_writer=RaysumeWriter(url, step=step, **options))


def steps(url: Path) -> list[int]:
    return [commit.step for commit in CommitLog(LocalStore(url), None).commits()]


def assert_equal(one: object, other: object) -> None:
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert isinstance(other, dict)
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list):
        assert isinstance(other, list)
        for mine, theirs in zip(one, other, strict=True):
            assert_equal(mine, theirs)
    else:
        assert (type(one), one) == (type(other), other)


def test_plain_sections_of_a_callers_own_are_in_the_manifest_and_no_load_minds_them(tmp_path: Path) -> None:
    shared, own = {"progress": {"step": 7}}, {"rank": 0}
    save(tmp_path, 7, shared_state=shared, rank_state=own)
    filled, reader = state(0), RaysumeReader(tmp_path)
    dcp.load(filled, storage_reader=reader)
    assert_equal(filled, state(7))
    assert reader.manifest.shared_state["progress"] == shared["progress"]
    assert reader.manifest.rank_states[0]["rank"] == 0


def test_what_was_saved_is_loaded_and_verifies(tmp_path: Path) -> None:
    save(tmp_path, 7)
    filled = state(0)
    dcp.load(filled, storage_reader=RaysumeReader(tmp_path))
    assert_equal(filled, state(7))
    store = LocalStore(tmp_path)
    log = CommitLog(store, None)
    assert verify_commit(store, log, log.commits()[0]).is_good


def test_the_newest_step_is_loaded_unless_one_is_named(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save(tmp_path, step)
    filled = state(0)
    assert load(filled, RaysumeReader(tmp_path)) == 100
    assert filled["step"] == 100
    assert load(filled, RaysumeReader(tmp_path, step=9)) == 9
    assert filled["step"] == 9
    with pytest.raises(ObjectMissing, match=r"step 11 .*usable steps: 9, 10, 100"):
        load(filled, RaysumeReader(tmp_path, step=11))


def test_an_empty_place_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ObjectMissing, match=str(tmp_path / "typo")):
        load(state(), RaysumeReader(tmp_path / "typo"))


def test_tied_weights_are_stored_once_and_fill_both_names(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(50, 8), "head": nn.Linear(8, 50, bias=False)})
    model["head"].weight = model["embed"].weight
    save(tmp_path, 1, {"model": model.state_dict()})
    manifest = CommitLog(LocalStore(tmp_path), None)
    stored = manifest.read_manifest(manifest.commits()[0]).tensors
    assert set(stored) == {"model.embed.weight"}
    filled = {"model": {"embed.weight": torch.zeros(50, 8), "head.weight": torch.zeros(50, 8)}}
    load(filled, RaysumeReader(tmp_path))
    assert torch.equal(filled["model"]["embed.weight"], model["embed"].weight)
    assert torch.equal(filled["model"]["head.weight"], model["embed"].weight)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({1, 2}, "builtins.set"),
        (b"x", "builtins.bytes"),
        (Path("a"), "PosixPath"),
        ((1, torch.ones(1)), "torch.Tensor"),
    ],
)
def test_what_is_no_plain_value_is_refused_by_name(tmp_path: Path, value: object, found: str) -> None:
    with pytest.raises(NotPlainValue, match=rf"rank 0 step 3: extra\.thing.* is a .*{found}"):
        save(tmp_path, 3, {"w": torch.ones(2), "extra": {"thing": value}})
    assert steps(tmp_path) == []


def nested(depth: int, wrap: Callable[[object], object]) -> object:
    value: object = 1
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (2**8192, r"thing is an integer of 8193 bits \(at most 8192\)"),
        (nested(200, lambda value: [value]), "nested more than 128 levels deep, or inside itself"),
        (nested(100, lambda value: (value,)), "nested more than 128 levels deep"),
        ("a\ud800", r"thing is text with lone surrogates \('a\\ud800'\)"),
        ({"k": ({"a\ud800": 1},)}, "key"),
    ],
)
def test_what_could_be_written_but_never_read_again_is_refused_by_name(
    tmp_path: Path, value: object, found: str
) -> None:
    with pytest.raises(NotPlainValue, match=rf"rank 0 step 3: .*{found}"):
        save(tmp_path, 3, {"w": torch.ones(2), "thing": value})
    assert steps(tmp_path) == []


@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        (torch.eye(3).to_sparse(), "sparse_coo"),
        (torch.empty(3, device="meta"), "on the meta device"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
    ],
)
def test_a_tensor_that_is_no_dense_block_is_refused_by_name(tmp_path: Path, tensor: torch.Tensor, found: str) -> None:
    with pytest.raises(StorageError, match=rf"rank 0 step 3: model\.odd is a tensor that is {found}"):
        save(tmp_path, 3, {"model": {"odd": tensor}})
    assert steps(tmp_path) == []


def test_a_conjugated_view_is_stored_as_its_values(tmp_path: Path) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 1j]).conj()
    save(tmp_path, 3, {"w": tensor, "imag": tensor.imag})
    filled = {"w": torch.zeros(2, dtype=torch.complex64), "imag": torch.zeros(2)}
    load(filled, RaysumeReader(tmp_path))
    assert torch.equal(filled["w"], tensor.resolve_conj())
    assert torch.equal(filled["imag"], torch.tensor([-2.0, 1.0]))


def test_values_at_the_limits_come_back(tmp_path: Path) -> None:
    what = {
        "int": -(2**8191),
        "lists": nested(120, lambda value: [value]),
        "tuples": nested(60, lambda value: (value,)),
    }
    save(tmp_path, 3, dict(what))
    filled: State = {"int": 0, "lists": [], "tuples": ()}
    load(filled, RaysumeReader(tmp_path))
    assert filled == what


def test_a_rank_that_stored_elsewhere_keeps_the_save_from_being_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dcp_lineage.lineage_of(str(tmp_path), StoreConfig()).store
    monkeypatch.setattr(store, "put", lambda *_args, **_options: None)
    with pytest.raises(CommitRefused, match=r"step 3 .* rank 0: .* is missing in file://.*the same url"):
        save(tmp_path, 3)
    assert steps(tmp_path) == []


def test_a_checkpoint_exception_of_torch_shows_our_message(tmp_path: Path) -> None:
    with pytest.raises(dcp.api.CheckpointException, match=r"rank 0 step 3: thing is a builtins\.set"):
        dcp.save({"thing": {1}}, storage_writer=RaysumeWriter(tmp_path, step=3))


def test_nothing_is_pickled_into_the_store(tmp_path: Path) -> None:
    save(tmp_path, 1)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) == 3
    for file in files:
        assert b"data.pkl" not in file.read_bytes()


def test_names_that_do_not_match_are_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    save(tmp_path, 1, {"a": torch.ones(3), "b": torch.ones(3), "n": 1})
    other = {"a": torch.zeros(3), "c": torch.zeros(3), "d": torch.zeros(3), "m": 5}
    with pytest.raises(ManifestMismatch) as caught:
        load(other, RaysumeReader(tmp_path))
    assert (caught.value.missing, caught.value.unexpected) == (("c", "d", "m"), ("b", "n"))
    assert not other["a"].any()
    load(other, RaysumeReader(tmp_path, allow_partial=True))
    assert other["a"].all()
    assert not other["c"].any()
    assert other["m"] == 5


def test_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, 1, {"a": torch.ones(3)})
    with pytest.raises(ValueError, match=r"Size mismatch.* for a"):
        load({"a": torch.zeros(4)}, RaysumeReader(tmp_path))


def test_a_corrupt_newest_falls_back_and_stays_out_of_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    shard = next((tmp_path / "shards").glob("step-0000000002/*/rank-00000.shard"))
    content = bytearray(shard.read_bytes())
    content[10] ^= 1
    shard.write_bytes(bytes(content))
    with pytest.raises(CorruptCheckpoint, match=r"rank-00000\.shard"):
        load(state(0), RaysumeReader(tmp_path, step=2))
    assert steps(tmp_path) == [1, 2]
    filled = state(0)
    with caplog.at_level(logging.WARNING):
        assert load(filled, RaysumeReader(tmp_path)) == 1
    assert "rank-00000.shard" in caplog.text
    assert_equal(filled, state(1))
    assert steps(tmp_path) == [1]


def test_a_change_after_async_save_returned_is_not_stored_and_a_load_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B19, B20. Nothing of step 7 is written before the load looks for it."""
    save(tmp_path, 6)
    is_looked_for, put, wait = threading.Event(), LocalStore.put, Lineage.wait_for_saves

    def gated_put(store: LocalStore, key: str, data: bytes | memoryview, **options: Any) -> None:
        assert is_looked_for.wait(30)
        put(store, key, data, **options)

    def announced_wait(lineage: Lineage, timeout_s: float) -> None:
        is_looked_for.set()
        wait(lineage, timeout_s)

    monkeypatch.setattr(LocalStore, "put", gated_put)
    monkeypatch.setattr(Lineage, "wait_for_saves", announced_wait)
    what = {**state(7), "w": torch.ones(1000, 1000), "tied": None, "values": [1, 2]}
    what["tied"] = what["w"]
    future = dcp.async_save(what, storage_writer=RaysumeWriter(tmp_path, step=7))
    what["w"].fill_(2)
    what["values"].append(3)
    filled = {**state(0), "w": torch.zeros(1000, 1000), "tied": torch.zeros(1000, 1000), "values": []}
    dcp.load(filled, storage_reader=RaysumeReader(tmp_path))
    assert future.done()
    assert filled["step"] == 7
    assert filled["w"].unique().tolist() == filled["tied"].unique().tolist() == [1.0]
    assert filled["values"] == [1, 2]
    reader = RaysumeReader(tmp_path)
    load(filled, reader)
    assert "w" not in reader.manifest.tensors  # "tied" sorts first and is stored, once


def test_an_async_save_that_failed_is_not_waited_for(tmp_path: Path) -> None:
    save(tmp_path, 1)
    future = dcp.async_save({"w": torch.ones(1), "bad": {1}}, storage_writer=RaysumeWriter(tmp_path, step=2))
    filled = state(0)
    dcp.load(filled, storage_reader=RaysumeReader(tmp_path))
    assert filled["step"] == 1
    with own_errors("save"), pytest.raises(dcp.api.CheckpointException):
        future.result()


def test_retention_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step, metric in ((1, 0.5), (2, 3.0), (3, 2.0), (4, 4.0)):
        save(tmp_path, step, keep=2, metric=metric)
    assert steps(tmp_path) == [1, 3, 4]


def test_a_save_that_goes_back_makes_the_later_ones_void(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    load(state(0), RaysumeReader(tmp_path, step=10))
    save(tmp_path, 20, state(99))
    assert steps(tmp_path) == [10, 20]
    filled = state(0)
    load(filled, RaysumeReader(tmp_path))
    assert filled["step"] == 99


def test_a_save_that_is_tried_again_voids_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10)
    monkeypatch.setattr(dcp_lineage, "_lineages", {})  # as another process would begin
    load(state(0), RaysumeReader(tmp_path))
    for step in (20, 30):
        save(tmp_path, step)
    with pytest.raises(NotPlainValue):
        save(tmp_path, 40, {"bad": {1}})
    save(tmp_path, 40)
    assert steps(tmp_path) == [10, 20, 30, 40]


def test_a_process_that_was_overtaken_saves_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10)
    ours = dict(dcp_lineage._lineages)
    monkeypatch.setattr(dcp_lineage, "_lineages", {})  # as another process would begin
    save(tmp_path, 20)
    monkeypatch.setattr(dcp_lineage, "_lineages", ours)
    with pytest.raises(CommitRefused, match=r"step 30 of attempt a000001-.* a000002-.* committed step 20"):
        save(tmp_path, 30)
    assert steps(tmp_path) == [10, 20]
    assert not list((tmp_path / "shards").glob("step-0000000030/**/*.shard"))


def test_the_place_of_a_driver_is_refused(tmp_path: Path) -> None:
    LocalStore(tmp_path).put(f"{JOURNAL}00000000.0badcafe.json", b"{}")
    with pytest.raises(CommitRefused, match="belongs to a Run with a driver"):
        save(tmp_path, 1)


def test_a_writer_is_for_one_save_and_its_own_place(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leave it out"):
        dcp.save(state(), checkpoint_id="x", storage_writer=RaysumeWriter(tmp_path, step=1))
    with pytest.raises(ValueError, match="keep 0"):
        RaysumeWriter(tmp_path, step=1, keep=0)
    for step in (-1, 1.5, "40", None, 10**10):
        with pytest.raises(ValueError, match=rf"step .*{step}.*: expected .*0 to 9999999999"):
            RaysumeWriter(tmp_path, step=step)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="base_step 2: expected at most the step that is saved, 1"):
        RaysumeWriter(tmp_path, step=1, base_step=2)
    with pytest.raises(ValueError, match="metric 'best': expected a number"):
        RaysumeWriter(tmp_path, step=1, metric="best")  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="use_collectives"), own_errors("save"):
        dcp.save(state(), storage_writer=RaysumeWriter(tmp_path, step=1), use_collectives=False)


def test_a_state_can_be_rebuilt_without_a_template(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    what = OrderedDict(state(4))
    del what["model"]["none"]
    save(tmp_path, 4, dict(what))
    found = _load_state_dict_from_keys(storage_reader=RaysumeReader(tmp_path))
    assert torch.equal(found["model"]["w"], what["model"]["w"])
    assert found["optim"]["param_groups"][0]["betas"] == (0.9, 0.95)
