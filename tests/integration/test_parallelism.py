"""Sharded, replicated and alone: one arithmetic, one Checkpoint. Real: processes, gloo, FSDP2, TrainStep, local store.

All worlds are formed by the same three processes, one after the other, which is also how a regroup uses them.
"""

from __future__ import annotations

import json
import multiprocessing
from typing import Any

import pytest

from tests.integration import parallelism_ranks as ranks

Reports = dict[str, list[dict[str, Any]]]
_TIMEOUT_S = 200.0


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    folder = tmp_path_factory.mktemp("parallelism")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integration.parallelism_ranks"])  # torch is imported once, not three times
    processes = [context.Process(target=ranks.run, args=(rank, folder)) for rank in range(ranks.NUM_PROCESSES)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(_TIMEOUT_S)
        assert [process.exitcode for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    found: Reports = {}
    for file in sorted(folder.glob("*-rank-*.json")):
        phase, _, _ = file.stem.rpartition("-rank-")
        found.setdefault(phase, []).append(json.loads(file.read_text()))
    return found


def alike(found: dict[str, list[float]], expected: dict[str, list[float]], rel: float = 1e-4) -> bool:
    return found.keys() == expected.keys() and all(
        found[name] == pytest.approx(expected[name], rel=rel, abs=1e-6) for name in expected
    )


@pytest.mark.parametrize(("kind", "size"), ranks.TRAINED)
def test_the_arithmetic_is_the_same_at_every_size(reports: Reports, kind: str, size: int) -> None:
    """Leaves that do not share out evenly, clipping, a 0-dim parameter."""
    expected = reports["train-alone-1"][0]
    for report in reports[f"train-{kind}-{size}"]:
        assert report["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert report["norms"][0] > 0.5, "nothing was clipped"
        assert alike(report["values"], expected["values"])


@pytest.mark.parametrize("size", ranks.SIZES)
def test_replicas_are_whole_alike_to_the_bit_and_freed_with_the_world(reports: Reports, size: int) -> None:
    found = reports[f"train-ddp-{size}"]
    assert len({json.dumps(report["digests"]) for report in found}) == 1
    assert all(report["is_whole"] and report["is_freed"] for report in found)
    assert not any(report["is_whole"] for report in reports[f"train-fsdp-{size}"])


def test_hsdp_keeps_replicas_of_shards_that_are_written_once(reports: Reports) -> None:
    found = reports["train-hsdp-4"]
    assert [sorted(report["shards"]) for report in found[:2]] == [sorted(report["shards"]) for report in found[2:]]
    sharded = [{name for name in report["names"] if name in report["shards"]} for report in found]
    for one, other in ((0, 2), (1, 3)):
        assert not sharded[one] & sharded[other]
        assert sharded[one] | sharded[other] == set(found[one]["shards"])
    assert len({json.dumps(report["digests"]) for report in found}) == 1


@pytest.mark.parametrize("size", ranks.SIZES)
def test_each_tensor_is_written_once_and_by_turns(reports: Reports, size: int) -> None:
    by_rank = [report["names"] for report in reports[f"train-ddp-{size}"]]
    written = [name for names in by_rank for name in names if not name.startswith("rng.")]
    assert sorted(written) == sorted(set(written))
    assert set(written) == reports["train-alone-1"][0]["digests"].keys()


@pytest.mark.parametrize(("kind", "size"), ranks.LOADED)
@pytest.mark.parametrize("saved", ranks.KINDS)
def test_a_checkpoint_of_any_loads_into_any_to_the_bit(
    reports: Reports, saved: ranks.Kind, kind: str, size: int
) -> None:
    before = reports[f"train-{saved}-{ranks.SAVED[saved]}"][0]
    loaded = reports[f"load-{saved}-{kind}-{size}"]
    assert len(loaded) == size
    for report in loaded:
        assert report["digests"] == before["digests"]
        assert (report["lr"], report["scheduler"]) == (before["lr"], before["scheduler"])
        assert report["progress"]["step"] == ranks.STEPS
        assert report["next_norms"] == pytest.approx(loaded[0]["next_norms"], rel=1e-6)
    assert loaded[0]["next_norms"] == pytest.approx(reports[f"load-{saved}-alone-1"][0]["next_norms"], rel=1e-4)


def test_names_are_the_same_and_carry_no_wrapper(reports: Reports) -> None:
    names = {json.dumps(sorted(reports[f"train-{kind}-{size}"][0]["digests"])) for kind, size in ranks.TRAINED}
    assert len(names) == 1
    assert not {"module", "_orig_mod", "_fsdp_wrapped_module"} & set(".".join(json.loads(names.pop())).split("."))


@pytest.mark.parametrize("size", ranks.SIZES)
def test_parameters_that_few_leaves_use_or_none_does_train_as_they_do_alone(reports: Reports, size: int) -> None:
    expected = reports["branchy-alone-1"][0]
    assert {"rare", "single"} < set(expected["with_moments"])
    assert not {"never", "frozen"} & set(expected["with_moments"])
    for report in reports[f"branchy-ddp-{size}"]:
        assert report["with_moments"] == expected["with_moments"]
        assert alike(report["values"], expected["values"])


def test_sums_in_double_give_the_same_bits_at_every_size(reports: Reports) -> None:
    found = [report for size in ranks.SIZES for report in reports[f"double-ddp-{size}"]]
    assert len({json.dumps(report["digests"]) for report in found}) == 1
    assert len({json.dumps(report["norms"]) for report in found}) == 1


def test_one_flipped_bit_on_one_rank_refuses_the_commit_and_names_it(reports: Reports) -> None:
    """Three steps after it: what is applied on top is the same everywhere, so replicas stay apart."""
    said = reports["flip-ddp-3"][0]["said"]
    assert said[0] == "committed"
    assert "what rank 1 holds differs from the 2 others" in said[1]
    assert "model.single" in said[1]


def test_of_two_ranks_both_are_named(reports: Reports) -> None:
    said = reports["flip-ddp-2"][0]["said"]
    assert said[0] == "committed"
    assert "what rank 0, 1 holds differs, with no majority" in said[1]


def test_what_cannot_be_sharded_is_compared_under_fsdp_too(reports: Reports) -> None:
    said = reports["flip-fsdp-3"][0]["said"]
    assert said[0] == "committed"
    assert "what rank 1 holds differs from the 2 others, first in model.temperature" in said[1]


def test_replicas_of_a_shard_are_compared_under_hsdp(reports: Reports) -> None:
    """Ranks 1 and 3 hold the same shard; 0 and 2 another."""
    said = reports["flip-hsdp-4"][0]["said"]
    assert said[0] == "committed"
    assert "what rank 1, 3 holds differs, with no majority" in said[1]
    assert "model.few" in said[1]
