"""Save at four ranks, load at 4, 3, 5, 1 and 5 again. Real: processes, gloo, FSDP2, codec, local store, commit log.

All worlds are formed by the same five processes, one after the other, which is also how a regroup uses them.
"""

from __future__ import annotations

import json
import multiprocessing
from typing import Any

import pytest

from tests.integration import reshard_ranks as ranks

Reports = dict[str, list[dict[str, Any]]]
_TIMEOUT_S = 240.0


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    folder = tmp_path_factory.mktemp("reshard")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integration.reshard_ranks"])  # torch is imported once, not five times
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
    for file in sorted(folder.glob("*-*.json")):
        phase, _, _ = file.stem.rpartition("-")
        found.setdefault(phase, []).append(json.loads(file.read_text()))
    return found


def loads(reports: Reports) -> list[tuple[int, list[dict[str, Any]]]]:
    return [(size, reports[f"load-{index}-{size}"]) for index, size in enumerate(ranks.LOAD_SIZES)]


def test_weights_from_scratch_are_the_same_at_every_world_size(reports: Reports) -> None:
    all_digests = [report["digests"] for size in ranks.FRESH_SIZES for report in reports[f"fresh-{size}"]]
    assert all(digests == all_digests[0] for digests in all_digests)
    assert len(set(all_digests[0].values())) > 8


def test_every_tensor_is_equal_to_the_bit_at_every_world_size(reports: Reports) -> None:
    """B35, B36: one row on four ranks, one element, no dimension, tied, frozen."""
    saved = reports["save"][0]["digests"]
    assert {"model.single", "model.wide", "model.temperature", "model.count", "optim.frozen_later.exp_avg"} <= set(
        saved
    )
    assert "model.head.weight" not in saved  # tied: stored once, as the embedding
    for _, loaded in loads(reports):
        for report in loaded:
            assert report["digests"] == saved


def test_names_carry_no_wrapper(reports: Reports) -> None:
    for name in reports["save"][0]["digests"]:
        assert not {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"} & set(name.split("."))


def test_progress_and_learning_rate_are_those_of_the_save(reports: Reports) -> None:
    saved = reports["save"][0]
    for _, loaded in loads(reports):
        for report in loaded:
            assert (report["progress"], report["lr"]) == (saved["progress"], saved["lr"])


def test_training_goes_on_with_the_loss_of_the_unbroken_run(reports: Reports) -> None:
    for _, loaded in loads(reports):
        for report in loaded:
            assert report["loss"] == pytest.approx(reports["save"][0]["loss"], rel=1e-6)


def test_each_rank_goes_on_with_its_own_random_numbers(reports: Reports) -> None:
    """B43: equal to the unbroken run's of that rank, and different between ranks."""
    saved = [report["draws"] for report in reports["save"]]
    assert len({tuple(draws) for draws in saved}) == ranks.SAVE_SIZE
    for size, loaded in loads(reports):
        kept = min(size, ranks.SAVE_SIZE)
        assert [report["draws"] for report in loaded[:kept]] == saved[:kept]
        assert not any(report["reseeded"] for report in loaded[:kept])


def test_each_rank_gets_its_own_tracker_back_and_not_that_of_rank_0(reports: Reports) -> None:
    """B30: plain values and tensors, of another size on each rank; a new rank starts fresh, a lost one is named."""
    saved = [report["own"] for report in reports["save"]]
    assert [own[0] for own in saved] == [100, 101, 102, 103]
    for size, loaded in loads(reports):
        kept = min(size, ranks.SAVE_SIZE)
        assert [report["own"] for report in loaded[:kept]] == saved[:kept]
        lines = [line for report in loaded for line in report["lines"] if "rank trackers" in line]
        assert (
            lines
            == {
                1: ["rank trackers (loader) of ranks 1 to 3 are dropped: step 3 was saved by 4 ranks, here are 1"],
                3: ["rank trackers (loader) of rank 3 is dropped: step 3 was saved by 4 ranks, here are 3"],
                4: [],
                5: ["rank 4: rank trackers (loader) start fresh: step 3 was saved by 4 ranks"],
            }[size]
        )
        if size == 5:
            assert loaded[4]["own"] == [0, 0, 0, 0, 0, 0]


def test_optimizer_state_that_no_other_world_could_be_given_is_refused_by_name(reports: Reports) -> None:
    for report in reports["save"]:
        one_rank, sharded = report["refused"]
        assert one_rank.startswith("optim.few.factored is a tensor of one rank, of shape (2,), beside a parameter")
        assert sharded.startswith("optim.few.factored is sharded in another shape, (3,), than its parameter")


def test_a_tracker_that_differs_where_it_should_not_is_named(reports: Reports) -> None:
    """Every rank gets that of rank 0, as it must, but not in silence."""
    for _, loaded in loads(reports):
        assert [report["drifting"] for report in loaded] == [200] * len(loaded)
        said = [line for report in loaded for line in report["lines"] if "was not equal on all ranks" in line]
        assert len(said) == 1
        assert said[0].startswith("tracker drifting was not equal on all ranks when it was saved (rank 1 differs")


def test_a_new_rank_is_reseeded_repeatably_and_says_so(reports: Reports) -> None:
    """B43: growth from four to five ranks, twice."""
    first, second = [loaded for size, loaded in loads(reports) if size == 5]
    assert first[4]["reseeded"]
    assert any("rank 4 reseeded" in line for line in first[4]["lines"])
    assert first[4]["draws"] == second[4]["draws"]
    assert first[4]["draws"] not in [report["draws"] for report in first[:4]]
