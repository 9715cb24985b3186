"""What of transformers.Trainer is supported, and whether a resume would see the same samples. Refuses by name.

Here is also what keeps Trainer from a step too many: it trains one more where it goes on from its last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue
from torch.optim import Optimizer

from workers.errors import LoopMisused

__all__ = [
    "global_batch",
    "inner_optimizer",
    "require_same_data",
    "require_supported",
    "train_no_step",
    "train_steps_again",
    "trains_no_step",
]

_FETCH = "get_batch_samples"


def global_batch(trainer: Any) -> int:
    """Samples of one optimizer step, over all ranks."""
    args = trainer.args
    return int(trainer._train_batch_size * args.gradient_accumulation_steps * max(1, args.world_size))


def inner_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer that accelerate may have wrapped."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, Optimizer):
        raise LoopMisused(f"the optimizer is a {type(inner).__name__}: only those of torch.optim can be saved")
    return inner


def require_supported(trainer: Any) -> None:
    """Raises LoopMisused for what would not be the same training after a resume."""
    args = trainer.args
    version = getattr(getattr(trainer.accelerator.state, "fsdp_plugin", None), "fsdp_version", None)
    problem = (
        "DeepSpeed keeps the state in its own form: use its checkpoints"
        if trainer.is_deepspeed_enabled
        else "FSDP of version 1 hides parameters in flat ones: set fsdp_config={'version': 2}"
        if trainer.is_fsdp_enabled and version != 2
        else "ignore_data_skip=True would repeat samples after a resume: leave it off"
        if args.ignore_data_skip
        else "auto_find_batch_size changes the batch as it goes: fix per_device_train_batch_size"
        if args.auto_find_batch_size
        else "this version of transformers has no Trainer._load_from_checkpoint; use one of >=5.20,<6"
        if not hasattr(trainer, "_load_from_checkpoint")
        else None
    )
    if problem is not None:
        raise LoopMisused(f"RaysumeCallback: {problem}")


def require_same_data(saved: Mapping[str, JsonValue], here: Mapping[str, JsonValue], step: int) -> None:
    """Raises LoopMisused where the samples after ``step`` would not be those of an uninterrupted run."""
    changed = [
        f"{name} {saved[name]!r} -> {here[name]!r}"
        for name in sorted(saved)
        if name in here and saved[name] != here[name]
    ]
    if changed:
        raise LoopMisused(
            f"the data of step {step} and of this training differ ({', '.join(changed)}): samples would be repeated or "
            "left out. The global batch is per_device_train_batch_size * gradient_accumulation_steps * processes: keep "
            "it when the number of processes changes. To go on all the same: allow_changed_data=True"
        )


def train_no_step(trainer: Any, control: Any) -> None:
    """In `on_train_begin`, of a training that is done: its epoch has no batches. Until `train_steps_again`."""
    control.should_training_stop = True
    setattr(trainer, _FETCH, _no_batches)


def trains_no_step(trainer: Any) -> bool:
    return vars(trainer).get(_FETCH) is _no_batches


def train_steps_again(trainer: Any) -> None:
    if trains_no_step(trainer):
        delattr(trainer, _FETCH)


def _no_batches(*args: Any, **kwargs: Any) -> tuple[list[Any], None]:
    del args, kwargs
    return [], None
