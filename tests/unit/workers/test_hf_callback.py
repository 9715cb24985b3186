"""transformers.Trainer with Raysume's Checkpoints in one process; model, Trainer, codec and store of files are real."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from storage.commit_log import CommitLog
from storage.errors import StorageError
from storage.local_store import LocalStore
from tests.fakes.hf_script import Rows, make_arguments, make_model, mask
from workers.errors import LoopMisused
from workers.hf_callback import RaysumeCallback, TrainingStopped
from workers.weights_digest import weights_digest

STEPS = 12
PER_EPOCH = 6
NEVER = 1000


class Lines(TrainerCallback):  # type: ignore[misc]
    """What was logged of each step, in order."""

    def __init__(self) -> None:
        self.losses: dict[int, tuple[float, float, float]] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        del args, control, kwargs
        if logs and "loss" in logs:
            self.losses[state.global_step] = (logs["loss"], float(logs["grad_norm"]), logs["learning_rate"])


def train(folder: Path, max_steps: int, *, rows: int = 44, **changes: Any) -> tuple[Trainer, Lines]:
    """From the newest Checkpoint in ``folder`` to ``max_steps``; the rate is constant, whatever they are."""
    lines = Lines()
    options = {name: changes.pop(name) for name in ("allow_changed_data", "keep") if name in changes}
    trainer = make_trainer(folder, lines, rows=rows, max_steps=max_steps, **changes)
    RaysumeCallback(folder / "run", every_steps=NEVER, **options).train(trainer)
    return trainer, lines


def make_trainer(
    folder: Path, *callbacks: Any, rows: int = 44, collate: Callable[[Any], Any] | None = None, **changes: Any
) -> Trainer:
    settings = {"lr_scheduler_type": "constant", "eval_strategy": "no", **changes}
    return Trainer(
        model=make_model(),
        args=make_arguments(folder / "out", **settings),
        train_dataset=Rows(rows),
        eval_dataset=Rows(8, seed=6),
        data_collator=collate,
        callbacks=list(callbacks),
    )


def committed(folder: Path) -> list[int]:
    return [commit.step for commit in CommitLog(LocalStore(folder / "run"), None).commits()]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[float, float, float]]:
    _, lines = train(tmp_path_factory.mktemp("unbroken"), STEPS)
    assert sorted(lines.losses) == list(range(1, STEPS + 1))
    return lines.losses


@pytest.mark.parametrize("end", [4, PER_EPOCH, 9])
def test_a_training_that_goes_on_from_its_end_is_the_longer_one(
    end: int, unbroken: dict[int, Any], tmp_path: Path
) -> None:
    train(tmp_path, end)
    assert committed(tmp_path) == [end]
    trainer, lines = train(tmp_path, STEPS)
    assert lines.losses == {step: line for step, line in unbroken.items() if step > end}
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == list(range(1, STEPS + 1))
    assert committed(tmp_path) == [end, STEPS]
    assert "_load_from_checkpoint" not in vars(trainer), "Trainer can no longer load a folder of its own"


def test_a_corrupt_checkpoint_is_quarantined_and_the_one_before_it_taken(
    unbroken: dict[int, Any], tmp_path: Path
) -> None:
    train(tmp_path, 4)
    train(tmp_path, 8)
    [shard] = (tmp_path / "run" / "shards").rglob("*step-0000000008*")
    file = next(path for path in (shard, *shard.rglob("*")) if path.is_file())
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    _, lines = train(tmp_path, STEPS)
    assert lines.losses == {step: line for step, line in unbroken.items() if step > 4}
    assert committed(tmp_path) == [4, STEPS]


def test_the_log_line_after_a_resume_is_the_mean_over_all_its_steps(tmp_path: Path) -> None:
    _, whole = train(tmp_path / "whole", STEPS, logging_steps=5)
    train(tmp_path, 7, logging_steps=5)
    _, rest = train(tmp_path, STEPS, logging_steps=5)
    assert rest.losses == {10: whole.losses[10]}


@pytest.mark.parametrize("end", [4, PER_EPOCH, 9])
def test_what_a_collator_drew_ahead_of_the_step_is_not_drawn_again(end: int, tmp_path: Path) -> None:
    _, whole = train(tmp_path / "whole", STEPS, collate=mask)
    train(tmp_path, end, collate=mask)
    trainer, rest = train(tmp_path, STEPS, collate=mask)
    assert rest.losses == {step: line for step, line in whole.losses.items() if step > end}
    assert "get_train_dataloader" not in vars(trainer)


def test_the_best_metric_survives_and_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 4, "metric_for_best_model": "loss", "greater_is_better": False}
    first, _ = train(tmp_path, 4, keep=1, **changes)
    second, _ = train(tmp_path, 8, keep=1, **changes)
    evaluated = [entry["eval_loss"] for entry in second.state.log_history if "eval_loss" in entry]
    assert evaluated[0] < evaluated[1], "the model that was meant to get worse got better"
    assert second.state.best_metric == first.state.best_metric == evaluated[0]
    assert committed(tmp_path) == [4, 8], "keep=1 took the best away"


def test_other_data_are_refused_by_name_and_taken_on_request(tmp_path: Path) -> None:
    train(tmp_path, 4)
    with pytest.raises(LoopMisused, match=r"num_samples 44 -> 40.*samples would be repeated"):
        train(tmp_path, 6, rows=40)
    with pytest.raises(LoopMisused, match="global_batch 8 -> 16"):
        train(tmp_path, 6, per_device_train_batch_size=8)
    _, lines = train(tmp_path, 6, rows=40, allow_changed_data=True)
    assert sorted(lines.losses) == [5, 6]


def test_the_same_global_batch_in_other_parts_goes_on(tmp_path: Path) -> None:
    train(tmp_path, 4)
    _, lines = train(tmp_path, 6, per_device_train_batch_size=8, gradient_accumulation_steps=1)
    assert sorted(lines.losses) == [5, 6]


def test_a_plain_call_of_train_is_refused_before_it_trains_from_the_start(tmp_path: Path) -> None:
    lines = Lines()
    trainer = make_trainer(tmp_path, lines, RaysumeCallback(tmp_path / "run", every_steps=2), max_steps=4)
    with pytest.raises(LoopMisused, match=r"call callback.train\(trainer\)"):
        trainer.train()
    assert not lines.losses


def test_resume_alone_serves_who_calls_train_himself(unbroken: dict[int, Any], tmp_path: Path) -> None:
    train(tmp_path, 4)
    lines, callback = Lines(), RaysumeCallback(tmp_path / "run", every_steps=NEVER)
    trainer = make_trainer(tmp_path, lines, callback, max_steps=STEPS)
    trainer.train(resume_from_checkpoint=callback.resume(trainer))
    assert lines.losses == {step: line for step, line in unbroken.items() if step > 4}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ignore_data_skip": True}, "ignore_data_skip"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
    ],
)
def test_what_would_repeat_samples_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(LoopMisused, match=reason):
        train(tmp_path, 2, **changes)


def test_a_last_step_that_cannot_be_stored_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifests").write_text("a file where a folder is to be")
    with pytest.raises(StorageError, match="step 2, the last of this process, could not be saved"):
        train(tmp_path, 2)


def test_the_last_step_is_saved_as_it_was_trained_though_trainer_ends_with_the_best_model(tmp_path: Path) -> None:
    best = {
        "load_best_model_at_end": True,
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "loss",
        "greater_is_better": True,  # as it falls while the model learns, step 2 is the best
    }
    first, _ = train(tmp_path, 4, **best)
    assert first.state.best_global_step == 2
    _, lines = train(tmp_path, 6, **best)
    _, whole = train(tmp_path / "whole", 6, **best)
    assert lines.losses == {step: whole.losses[step] for step in (5, 6)}


def test_the_mean_loss_of_the_summary_is_that_of_the_steps_of_this_process(
    unbroken: dict[int, Any], tmp_path: Path
) -> None:
    train(tmp_path, 4, logging_steps=3)
    trainer, _ = train(tmp_path, 8, logging_steps=3)
    found = [entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry]
    assert found == [pytest.approx(sum(unbroken[step][0] for step in range(5, 9)) / 4, rel=1e-5)]


@pytest.mark.parametrize("end", [4, PER_EPOCH])
def test_a_training_that_is_done_is_not_trained_a_step_further(end: int, tmp_path: Path) -> None:
    changes = {"eval_strategy": "epoch", "logging_strategy": "epoch"}
    first, _ = train(tmp_path, end, **changes)
    again, lines = train(tmp_path, end, **changes)
    assert lines.losses == {}
    assert again.state.global_step == end
    assert committed(tmp_path) == [end]
    assert weights_digest(again.model, rank=0) == weights_digest(first.model, rank=0)
    assert [entry for entry in again.state.log_history if "train_runtime" not in entry] == [
        entry for entry in first.state.log_history if "train_runtime" not in entry
    ]
    assert "get_batch_samples" not in vars(again)


class Breaks(TrainerCallback):  # type: ignore[misc]
    """Raises in the first epoch that it sees begin."""

    has_broken = False

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, state, control, kwargs
        if not self.has_broken:
            self.has_broken = True
            raise OSError("somebody else's")


def test_a_training_that_was_done_and_broke_all_the_same_can_be_made_longer_in_the_same_process(
    unbroken: dict[int, Any], tmp_path: Path
) -> None:
    train(tmp_path, 4)
    lines = Lines()
    trainer = make_trainer(tmp_path, lines, Breaks(), max_steps=4)
    callback = RaysumeCallback(tmp_path / "run", every_steps=NEVER)
    with pytest.raises(OSError, match="somebody else's"):
        callback.train(trainer)
    trainer.args.max_steps = 6
    callback.train(trainer)
    assert lines.losses == {step: unbroken[step] for step in (5, 6)}


class Told(TrainerCallback):  # type: ignore[misc]
    """Sends this process a SIGTERM in the step after ``after``, at the end of which Trainer calls ``event``."""

    def __init__(self, after: int, event: str) -> None:
        self._after = after
        setattr(self, event, self._tell)

    def _tell(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control, kwargs
        if state.global_step >= self._after:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("after", "event"), [(3, "on_substep_end"), (4, "on_step_end"), (4, "on_train_end")])
def test_a_stop_in_the_very_last_step_ends_the_process_when_it_is_committed(
    after: int, event: str, tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(tmp_path, Told(after, event), max_steps=4)
    with pytest.raises(TrainingStopped, match="step 4 is committed") as stopped:
        RaysumeCallback(tmp_path / "run", every_steps=NEVER).train(trainer)
    assert stopped.value.code == 14
    assert committed(tmp_path) == [4]
    assert signal.getsignal(signal.SIGTERM) is before
    _, lines = train(tmp_path, 4)
    assert lines.losses == {}, "the same script goes on behind its training"


def test_how_to_save_must_be_said_once() -> None:
    with pytest.raises(ValueError, match="every_steps=N or trigger"):
        RaysumeCallback("memory://run")


@pytest.mark.parametrize("number", [0, 1])
def test_the_script_of_the_docs_trains_and_commits(number: int, tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "hf-trainer.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "s3://bucket/run" in blocks[number]
    script = "\n".join(blocks[: number + 1]) if number == 0 else blocks[0].rpartition("RaysumeCallback")[0] + blocks[1]
    names = {"model": make_model(), "rows": Rows(), "args": make_arguments(tmp_path / "out", max_steps=2)}
    names["args"].eval_strategy = IntervalStrategy.NO
    exec(compile(script.replace("s3://bucket/run", str(tmp_path / "run")), "docs/hf-trainer.md", "exec"), names)
    assert committed(tmp_path) == [2]
