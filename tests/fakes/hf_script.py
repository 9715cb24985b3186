"""A script as a user of transformers.Trainer has one, run by tests as a process of its own, alone or by torchrun.

``hf_script.py URL LOG [kill:STEP | term:STEP]``: it writes a line for each step to LOG and, where asked, kills itself
after STEP, or sends itself a SIGTERM amid the step after it, once a Checkpoint of this life is committed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from workers.hf_callback import RaysumeCallback
from workers.weights_digest import weights_digest

_LOGGED = ("loss", "eval_loss", "grad_norm", "learning_rate", "epoch")
_LONGEST_WAIT_S = 60.0
DROPOUT = "TEST_DROPOUT"
VOCABULARY, LENGTH, NUM_ROWS = 97, 16, 44


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same in every process."""

    def __init__(self, count: int = NUM_ROWS, seed: int = 5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def mask(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A collator that draws, as one for masked language models does."""
    rows = torch.stack([sample["input_ids"] for sample in samples])
    rate = float(os.environ.get(DROPOUT, "0.1"))
    masked = torch.where(torch.rand(rows.shape) < rate, torch.zeros_like(rows), rows)
    return {"input_ids": masked, "labels": rows}


def make_model() -> GPT2LMHeadModel:
    """With dropout, as GPT-2 has it, unless the environment says otherwise."""
    torch.manual_seed(0)
    rate = float(os.environ.get(DROPOUT, "0.1"))
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=rate,
        embd_pdrop=rate,
        attn_pdrop=rate,
    )
    config.loss_type = "ForCausalLM"
    return GPT2LMHeadModel(config)


def make_arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Shuffled, two micro-batches a step, a warm-up, an evaluation every third step: 18 steps in three epochs."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4 // world_size,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 3,
        "learning_rate": 1e-2,
        "warmup_steps": 4,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "no",
        "seed": 3,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
    }
    return TrainingArguments(output_dir=str(folder), **{**settings, **changes})


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Writes every log line to ``log``, floats to the last bit, and ends the process as ``end`` says."""

    def __init__(self, log: Path, url: Path, end: str) -> None:
        self._log, self._commits = log, url / "commits"
        self._how, _, at = end.partition(":")
        self._at_step = int(at or 0)
        self._before = self._committed()

    def _committed(self) -> set[str]:
        return set(os.listdir(self._commits)) if self._commits.exists() else set()

    def _end(self, how: str, number: signal.Signals, state: Any) -> None:
        """Where ``how`` is what was asked for: once a Checkpoint of this life is there, so that it has one to lose."""
        if self._how != how or state.global_step < self._at_step or not state.is_world_process_zero:
            return
        until = time.monotonic() + _LONGEST_WAIT_S
        while not self._committed() - self._before:
            if time.monotonic() > until:
                raise TimeoutError(f"nothing was committed up to step {state.global_step}")
            time.sleep(0.01)
        self._how = ""
        os.kill(os.getpid(), number)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        del args, control, kwargs
        logged = {name: float(value).hex() for name, value in (logs or {}).items() if name in _LOGGED}
        if state.is_world_process_zero and ("loss" in logged or "eval_loss" in logged):
            with self._log.open("a") as file:
                file.write(json.dumps({"step": state.global_step, **logged}) + "\n")
        self._end("kill", signal.SIGKILL, state)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control, kwargs
        self._end("term", signal.SIGTERM, state)


def main(url: str, log: str, end: str = "") -> None:
    trainer = Trainer(
        model=make_model(),
        args=make_arguments(Path(log).with_suffix(".d")),
        train_dataset=Rows(),
        eval_dataset=Rows(8, seed=6),
        data_collator=mask,
        callbacks=[Recorder(Path(log), Path(url), end)],
    )
    RaysumeCallback(url, every_steps=2).train(trainer)
    if trainer.is_world_process_zero():
        end_of_log = {"digest": weights_digest(trainer.model, rank=0), "history": len(trainer.state.log_history)}
        with Path(log).open("a") as file:
            file.write(json.dumps(end_of_log) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
