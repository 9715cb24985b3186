"""What only several ranks can show of a training state: loss scaling, each rank's own trackers and random numbers, and
a sharded average of the weights, saved at one world size and gone on with at another.

Real: worker processes, gloo, FSDP2, Keepers, a local store, Manifests. The loops are a user's own; each checks on every
rank what holds there, and an Attempt in which it does not ends in an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from storage.sources import RestorePlan
from tests.fakes.rank_processes import Ended, Trio
from tests.fakes.state_loops import (
    OwnState,
    train_experts,
    train_hidden,
    train_holding_progress,
    train_plainly,
    train_scaled,
    train_with_dropout,
    train_with_own_state,
)
from tests.fakes.token_datasets import write_numbered_rows
from tests.fakes.worker_settings import make_settings
from tests.integration.test_worker_resume import plan_for
from workers.config import ModelConfig, OptimConfig
from workers.contract import OutcomeKind
from workers.settings import WorkerSettings

STEPS, SAVED_AT = 8, 5
NO_MODEL = ModelConfig()


@pytest.fixture(scope="module")
def pair() -> Iterator[Trio]:
    pair = Trio(2)
    try:
        yield pair
    finally:
        pair.close()


@pytest.fixture(scope="module")
def data_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("data"))
    write_numbered_rows(url, 200, sequence_length=16)
    return url


@pytest.fixture
def settings(data_url: str) -> WorkerSettings:
    made = make_settings(data_url, every_steps=SAVED_AT, total_steps=STEPS)
    return replace(made, model=NO_MODEL)


def assert_finished(ended: Sequence[Ended]) -> None:
    assert [one.outcome.kind for one in ended] == [OutcomeKind.FINISHED] * len(ended), ended[0].outcome.cause


def plan_of(root: Path, ended: Sequence[Ended], step: int) -> RestorePlan:
    """Of the Attempt that has ended so: a process keeps the Receipts of those before."""
    own = [
        replace(one, receipts=tuple(r for r in one.receipts if r.attempt.value() == one.outcome.attempt))
        for one in ended
    ]
    return plan_for(root, own, step)


SCALES = [1024.0, 1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0, 1024.0]


def test_an_overflow_on_one_rank_skips_the_update_on_all_at_any_world_size_and_the_run_goes_on(
    pair: Trio, settings: WorkerSettings, tmp_path: Path
) -> None:
    pair.make(settings, tmp_path, train_scaled)
    unbroken = {size: pair.run(size) for size in (1, 2)}
    for ended in unbroken.values():
        assert_finished(ended)
        reports = ended[0].reports
        assert [report.loss_scale for report in reports] == SCALES
        assert [report.is_update_skipped for report in reports] == [step == 3 for step in range(1, STEPS + 1)]
        assert reports[2].grad_norm == float("inf")
        # A step all the same: counted, its samples consumed, the schedule moved on.
        assert [report.step for report in reports] == list(range(1, STEPS + 1))
        assert [report.position for report in reports] == [8 * step for step in range(1, STEPS + 1)]
        assert len({report.lr for report in reports}) == STEPS
    alone, together = unbroken[1][0].reports, unbroken[2][0].reports
    assert [report.loss for report in together] == pytest.approx([report.loss for report in alone], rel=1e-5)
    assert [report.lr for report in together] == [report.lr for report in alone]
    plan = plan_of(tmp_path, unbroken[2], SAVED_AT)
    for size in (2, 1):
        resumed = pair.run(size, restore=plan)
        assert_finished(resumed)
        after = resumed[0].reports
        # The scale grows at step 7 only if the count of steps since the overflow was kept with it.
        assert [report.loss_scale for report in after] == SCALES[SAVED_AT:]
        assert [report.lr for report in after] == [report.lr for report in together[SAVED_AT:]]
        assert [report.loss for report in after] == pytest.approx(
            [report.loss for report in together[SAVED_AT:]], rel=1e-5
        )
        if size == 2:
            assert [report.loss for report in after] == [report.loss for report in together[SAVED_AT:]]
            assert resumed[0].outcome.weights_digest == unbroken[2][0].outcome.weights_digest


def test_loss_scaling_by_a_power_of_two_changes_no_bit_in_float32(
    pair: Trio, settings: WorkerSettings, tmp_path: Path
) -> None:
    digests = []
    for loss_scaling in (None, True):
        optim = OptimConfig(loss_scaling=loss_scaling)
        pair.make(replace(settings, optim=optim, total_steps=3), tmp_path / str(loss_scaling), train_plainly)
        ended = pair.run(2)
        assert_finished(ended)
        assert {report.loss_scale for report in ended[0].reports} == {65536.0 if loss_scaling else None}
        digests.append(
            (ended[0].outcome.weights_digest, [(report.loss, report.grad_norm) for report in ended[0].reports])
        )
    assert digests[0] == digests[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_only_some_leaves_use_is_summed_as_zero_in_the_others(
    pair: Trio, settings: WorkerSettings, tmp_path: Path, dtype: str
) -> None:
    """Alone a rank runs both leaves of a step, of two each one, with parameters of one shape that the other has not
    used."""
    data = settings.data.model_copy(update={"global_batch": 4})
    changed = replace(settings, data=data, model=ModelConfig.model_validate({"compute_dtype": dtype}))
    pair.make(changed, tmp_path, train_experts)
    alone, both = pair.run(1), pair.run(2)
    assert_finished(alone)
    assert_finished(both)
    norms = [[report.grad_norm for report in ended[0].reports] for ended in (alone, both)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


def test_an_output_in_which_fsdp_finds_no_tensor_is_an_error_and_no_silent_standstill(
    pair: Trio, settings: WorkerSettings, tmp_path: Path
) -> None:
    pair.make(settings, tmp_path, train_hidden)
    cause = pair.run(1)[0].outcome.cause
    assert cause.error_type == "LoopMisused"
    assert "no parameter of the optimizer has a gradient" in cause.message


@pytest.mark.parametrize("parallelism", ["fsdp", "ddp"])
def test_the_built_in_loop_trains_in_float16_with_a_scaler_and_goes_on_with_it(
    pair: Trio, settings: WorkerSettings, tmp_path: Path, parallelism: str
) -> None:
    model = ModelConfig.model_validate({"compute_dtype": "float16", "parallelism": parallelism})
    pair.make(replace(settings, model=model), tmp_path, train_plainly)
    unbroken = pair.run(2)
    assert_finished(unbroken)
    assert {report.loss_scale for report in unbroken[0].reports} == {65536.0}
    assert not any(report.is_update_skipped for report in unbroken[0].reports)
    resumed = pair.run(2, restore=plan_of(tmp_path, unbroken, SAVED_AT))
    assert_finished(resumed)
    assert [report.loss for report in resumed[0].reports] == [report.loss for report in unbroken[0].reports[SAVED_AT:]]
    assert resumed[0].outcome.weights_digest == unbroken[0].outcome.weights_digest


def test_saving_at_every_step_changes_no_bit(pair: Trio, settings: WorkerSettings, tmp_path: Path) -> None:
    """B25: the template of a Checkpoint, warm buffers and the probe of each save leave training as it is."""
    found = []
    for every_steps in (None, 1):
        checkpoint = settings.checkpoint.model_copy(update={"every_steps": every_steps})
        pair.make(replace(settings, checkpoint=checkpoint), tmp_path / str(every_steps), train_with_dropout)
        ended = pair.run(2)
        assert_finished(ended)
        steps = [receipt.step for receipt in ended[0].receipts]
        assert steps == [STEPS] if every_steps is None else len(steps) > 2  # the last is saved in any case
        found.append((ended[0].outcome.weights_digest, [report.loss for report in ended[0].reports]))
    assert found[0] == found[1]


@pytest.mark.parametrize("compute_dtype", ["float32", "float16"])
def test_a_reproducible_run_with_loss_scaling_has_the_same_bits_at_any_world_size(
    pair: Trio, settings: WorkerSettings, tmp_path: Path, compute_dtype: str
) -> None:
    """An overflow on the way, in a step that all of them skip."""
    model = ModelConfig.model_validate({"compute_dtype": compute_dtype})
    pair.make(replace(settings, model=model, reproducible=True), tmp_path, train_scaled)
    alone, together = pair.run(1), pair.run(2)
    assert_finished([*alone, *together])
    assert alone[0].outcome.weights_digest == together[0].outcome.weights_digest
    assert [(r.loss, r.grad_norm, r.loss_scale) for r in alone[0].reports] == [
        (r.loss, r.grad_norm, r.loss_scale) for r in together[0].reports
    ]
    assert [r.loss_scale for r in together[0].reports] == SCALES


def test_a_checkpoint_with_a_scaler_and_a_run_without_one_are_refused_to_each_other(
    pair: Trio, settings: WorkerSettings, tmp_path: Path
) -> None:
    scaled, plain = replace(settings, optim=OptimConfig(loss_scaling=True)), settings
    for saved, here, title in ((scaled, plain, "unexpected"), (plain, scaled, "missing")):
        root = tmp_path / title
        pair.make(saved, root, train_plainly)
        plan = plan_of(root, pair.run(1), SAVED_AT)
        pair.make(here, root, train_plainly)
        cause = pair.run(1, restore=plan)[0].outcome.cause
        assert cause.error_type == "ManifestMismatch"
        assert f"{title} in the checkpoint (1): scaler" in cause.message


class Own:
    """Runs `train_with_own_state` and reads what each rank wrote."""

    def __init__(self, pair: Trio, settings: WorkerSettings, root: Path) -> None:
        self._pair, self._settings, self._root = pair, settings, root
        self._number = 0

    def run(self, size: int, restore: RestorePlan | None = None) -> tuple[list[Ended], list[list[Any]]]:
        self._number += 1
        folder = self._root / f"logs-{self._number}"
        folder.mkdir(parents=True)
        self._pair.make(replace(self._settings, loop_config={"folder": str(folder)}), self._root, train_with_own_state)
        ended = self._pair.run(size, restore=restore)
        assert_finished(ended)
        logs = [(folder / f"rank-{rank}.txt").read_text().splitlines() for rank in range(size)]
        return ended, [[eval(line, {"__builtins__": {}}) for line in log] for log in logs]


def test_each_rank_gets_its_own_state_and_random_numbers_back_and_an_average_is_resharded(
    pair: Trio, settings: WorkerSettings, tmp_path: Path
) -> None:
    """B30, B43: 2 -> 2 equals the unbroken run on each rank, 2 -> 1 -> 2 by the rules."""
    own = Own(pair, settings, tmp_path)
    unbroken, logs = own.run(2)
    position, draws, steps, total = 1, 4, 5, 6
    saved = [log[SAVED_AT] for log in logs]
    assert [line[position] for line in saved] == [150, 151]
    assert saved[0][draws] != saved[1][draws]
    plan = plan_of(tmp_path, unbroken, SAVED_AT)

    again, resumed = own.run(2, plan)
    assert resumed == [log[SAVED_AT:] for log in logs]
    assert again[0].outcome.weights_digest == unbroken[0].outcome.weights_digest

    alone, shrunk = own.run(1, plan)
    assert shrunk[0][0][:6] == saved[0][:6]
    assert shrunk[0][0][total] == pytest.approx(saved[0][total], rel=1e-6)
    plan = plan_of(tmp_path, alone, STEPS)

    settings_on = replace(settings, total_steps=STEPS + 2)
    grown = [Own(pair, settings_on, tmp_path / str(time)).run(2, plan)[1] for time in range(2)]
    assert grown[0] == grown[1]  # repeatable, the new rank's random numbers included
    first = [log[0] for log in grown[0]]
    assert first[0][:total] == shrunk[0][-1][:total]
    assert [line[total] for line in first] == pytest.approx([shrunk[0][-1][total]] * 2, rel=1e-6)
    assert first[0][steps] == first[1][steps] == STEPS
    # The rank that is new has a fresh tracker, and random numbers that are no other's.
    fresh = OwnState(1)
    assert first[1][position:draws] == (101, fresh.values.tolist(), int(fresh.generator.get_state().sum()))
    assert first[1][draws] != first[0][draws]


def test_steps_and_tokens_count_on_through_three_processes(
    pair: Trio, settings: WorkerSettings, tmp_path: Path
) -> None:
    """B28: 30 steps and 30 x batch x length, not 10 or 20."""
    plan = None
    chains = []
    for life, until in enumerate((10, 20, 30)):
        if life:
            pair.replace(0)
        pair.processes[0].make(replace(settings, total_steps=until), tmp_path, train_holding_progress)
        ended = pair.run(1, restore=plan)
        assert_finished(ended)
        assert [report.step for report in ended[0].reports] == list(range(until - 9, until + 1))
        chains.append([report.sample_chain for report in ended[0].reports])
        plan = plan_of(tmp_path, ended, until)
    last = ended[0].reports[-1]
    assert (last.step, last.position, last.tokens) == (30, 30 * 8, 30 * 8 * 16)
    pair.processes[0].make(replace(settings, total_steps=30), tmp_path, train_holding_progress)
    unbroken = pair.run(1)[0].reports
    assert [report.sample_chain for report in unbroken] == [chain for part in chains for chain in part]
    assert unbroken[-1].tokens == last.tokens
