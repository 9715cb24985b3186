"""What a Checkpoint holds of a transformers.Trainer besides model, optimizer and schedule, as trackers.

Reads and fills; when and where a Checkpoint is saved or restored is `workers.hf_callback`'s matter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from transformers.trainer_callback import ExportableState, TrainerState

from storage.errors import StorageError
from storage.manifest import Manifest
from workers.plain_state import from_plain
from workers.restore_match import section
from workers.save_trigger import SaveTrigger

__all__ = [
    "BATCHES",
    "LOOP",
    "SUMMARY",
    "TRAINER",
    "LoopTracker",
    "TrainerTracker",
    "data_identity",
    "saved_fields",
    "write_state_file",
]

TRAINER = "trainer"
"""The name of the tracker that every rank has the same of."""
LOOP, BATCHES = "loop", "batches"
"""The names of those that each rank has its own of."""
_STATE_FILE = "trainer_state.json"
SUMMARY = "train_runtime"
"""Of all log lines only the summary that ends a call of train() has it."""
_LOOP_FIELDS = ("_total_loss_scalar", "_globalstep_last_logged", "current_flos")


def data_identity(trainer: Any, global_batch: int) -> dict[str, JsonValue]:
    """What decides which sample comes at which step."""
    dataset, args = trainer.train_dataset, trainer.args
    fingerprint = getattr(dataset, "_fingerprint", None)
    return {
        "num_samples": len(dataset) if hasattr(dataset, "__len__") else None,
        "fingerprint": fingerprint if isinstance(fingerprint, str) else None,
        "global_batch": global_batch,
        "seed": args.seed,
        "data_seed": args.data_seed,
        "order": str(getattr(args, "train_sampling_strategy", "random")),
        "drop_last": bool(args.dataloader_drop_last),
    }


class TrainerTracker:
    """TrainerState, the identity of the data, and the trigger's own state. Filled from a Checkpoint with the rest."""

    def __init__(self, trainer: Any, identity: Mapping[str, JsonValue], trigger: SaveTrigger) -> None:
        self._trainer, self._identity, self._trigger = trainer, dict(identity), trigger
        self.is_planned_end = False
        """Whether the save that comes next is made because the process stops on purpose."""
        self.is_between_steps = False
        """Whether the step after this one has fetched its batches already when the save is made."""

    def state_dict(self) -> dict[str, Any]:
        fields = _plain_state(self._trainer)
        history = [entry for entry in fields.pop("log_history") if SUMMARY not in entry]
        return {
            "state": fields,
            "log_history": _as_bytes(history),
            "data": self._identity,
            "trigger": self._trigger.state(is_planned_end=self.is_planned_end),
            "is_between_steps": self.is_between_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._trainer.state.log_history[:] = _from_bytes(state_dict["log_history"])
        self.is_between_steps = bool(state_dict["is_between_steps"])
        self._trigger.load(state_dict["trigger"])


class LoopTracker:
    """This rank's sums since the last log line, so that the line after a resume is the one there would have been."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        held: dict[str, Any] = {
            name: getattr(self._trainer, name) for name in _LOOP_FIELDS if hasattr(self._trainer, name)
        }
        if hasattr(self._trainer, "_tr_loss"):
            held["_tr_loss"] = self._trainer._tr_loss.detach()
        return held

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, value in state_dict.items():
            if hasattr(self._trainer, name):
                setattr(self._trainer, name, value)
        if hasattr(self._trainer, "_initial_global_step") and "_tr_loss" in state_dict:
            # The mean loss of the summary is over this process's steps: what comes along from earlier ones is no part.
            self._trainer._total_loss_scalar = -float(state_dict["_tr_loss"])


def saved_fields(manifest: Manifest, url: str) -> dict[str, Any]:
    """The plain part of the TrainerTracker in ``manifest``. Raises StorageError where it is no Trainer's."""
    saved = section(manifest, "trackers").get(TRAINER)
    if not isinstance(saved, dict) or not isinstance(saved.get("state"), dict):
        raise StorageError(
            f"step {manifest.step} in {url} was not saved by a Trainer; give this training a URL of its own"
        )
    return {name: from_plain(saved[name], {}) for name in ("state", "data") if name in saved}


def write_state_file(folder: Path, fields: Mapping[str, Any]) -> None:
    """The one file by which Trainer learns at which step it goes on; ``log_history`` comes later."""
    TrainerState(**fields).save_to_json(str(folder / _STATE_FILE))


def _plain_state(trainer: Any) -> dict[str, Any]:
    """The living TrainerState with the state of callbacks that have one, as plain values."""
    fields = asdict(trainer.state)
    fields["stateful_callbacks"] = _callback_states(trainer)
    plain: dict[str, Any] = json.loads(json.dumps(fields, default=_number))
    return plain


def _callback_states(trainer: Any) -> dict[str, Any]:
    """By class name, as TrainerState keeps them: several of one class are a list."""
    states: dict[str, list[Any]] = {}
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(callback, ExportableState):
            states.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: own if len(own) > 1 else own[0] for name, own in states.items()}


def _number(value: Any) -> float | int | str:
    """NumPy and torch scalars that a metric or a log line may hold."""
    if hasattr(value, "item"):
        number: float | int = value.item()
        return number
    return str(value)


def _as_bytes(history: list[dict[str, Any]]) -> torch.Tensor:
    """A long log would make every Manifest long; as a tensor it is encoded with the rest."""
    return torch.frombuffer(bytearray(json.dumps(history, default=_number).encode()), dtype=torch.uint8)


def _from_bytes(stored: torch.Tensor) -> list[dict[str, Any]]:
    history: list[dict[str, Any]] = json.loads(bytes(stored.cpu().numpy()))
    return history
