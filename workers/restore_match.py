"""Compares what a Checkpoint holds with what a training state expects, by name.

Pure: it reads no bytes and sets nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from pydantic import JsonValue

from storage.dcp_writer import dtype_name
from storage.errors import ManifestMismatch
from storage.manifest import Level, Manifest, TensorLayout
from workers.names import named_parameters, optimizer_names, persistent_buffers
from workers.snapshot import MODEL, OPTIM, TRACKER
from workers.state import TrainingState

__all__ = ["Match", "compare", "restricted", "saved_groups", "section"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What fits and what does not.

    ``model``: tensors to fill, by stored name. ``optimizer``: stored entries of each parameter name, by state key.
    """

    model: dict[str, torch.Tensor]
    optimizer: dict[str, dict[str, TensorLayout]]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        return not (self.missing or self.unexpected or self.reshaped)

    def require_exact(self, step: int) -> None:
        """Raise ManifestMismatch unless everything fits."""
        if not self.is_exact:
            raise ManifestMismatch(step, self.missing, self.unexpected, self.reshaped)


def restricted(match: Match, manifest: Manifest, levels: Collection[Level]) -> tuple[Match, tuple[str, ...]]:
    """``match`` without what is not of ``levels``, and the names of the parameters that get a fresh optimizer state.

    State goes as a whole: moments at zero beside a step counter that is not would make the first updates too large.
    """
    fresh = tuple(
        name
        for name, entries in match.optimizer.items()
        if any(layout.level not in levels for layout in entries.values())
    )
    lost = [name for name in match.model if manifest.tensors[name].level not in levels]
    if lost:
        raise ManifestMismatch(manifest.step, missing=tuple(f"{name} (not of {sorted(levels)})" for name in lost))
    optimizer = {name: entries for name, entries in match.optimizer.items() if name not in fresh}
    return replace(match, optimizer=optimizer), fresh


def section(manifest: Manifest, name: str) -> dict[str, JsonValue]:
    """One part of the replicated plain state; empty when the Checkpoint has none."""
    value = manifest.shared_state.get(name)
    return value if isinstance(value, dict) else {}


def saved_groups(manifest: Manifest) -> list[dict[str, Any]]:
    """Param groups as saved: ``names`` and ``settings`` each."""
    return cast("list[dict[str, Any]]", section(manifest, "optimizer").get("groups") or [])


def compare(state: TrainingState, manifest: Manifest) -> Match:
    """Match every part of ``state`` against ``manifest``."""
    model, missing, unexpected, reshaped = _compare_model(state, manifest.tensors)
    names = {name for group in optimizer_names(state.model, state.optimizer) for name in group}
    shapes = {name: tuple(parameter.shape) for name, parameter in named_parameters(state.model) if name in names}
    stored = _optimizer_entries(manifest.tensors)
    saved = {name for group in saved_groups(manifest) for name in group["names"]}
    missing += [f"{OPTIM}{name}" for name in names - saved]
    unexpected += [f"{OPTIM}{name}" for name in (saved | set(stored)) - names]
    misfits = {name for name in names & set(stored) if not _fits(shapes[name], stored[name])}
    reshaped += [f"{OPTIM}{name}" for name in misfits]
    trackers = set(section(manifest, "trackers"))
    missing += [f"{TRACKER}{name}" for name in set(state.trackers) - trackers]
    unexpected += [f"{TRACKER}{name}" for name in trackers - set(state.trackers)]
    return Match(
        model=model,
        optimizer={name: stored[name] for name in sorted((names & set(stored)) - misfits)},
        missing=tuple(sorted(missing)),
        unexpected=tuple(sorted(unexpected)),
        reshaped=tuple(sorted(reshaped)),
    )


def _compare_model(
    state: TrainingState, stored: Mapping[str, TensorLayout]
) -> tuple[dict[str, torch.Tensor], list[str], list[str], list[str]]:
    expected = {
        f"{MODEL}{name}": tensor for name, tensor in (*named_parameters(state.model), *persistent_buffers(state.model))
    }
    fitting: dict[str, torch.Tensor] = {}
    missing: list[str] = []
    reshaped: list[str] = []
    for name, tensor in expected.items():
        layout = stored.get(name)
        here = (dtype_name(tensor.dtype), tuple(tensor.shape))
        if layout is None:
            missing.append(name)
        elif (layout.dtype, layout.shape) != here:
            reshaped.append(f"{name} (saved {layout.dtype} {layout.shape}, here {here[0]} {here[1]})")
        else:
            fitting[name] = tensor.detach()
    unexpected = [name for name in stored if name.startswith(MODEL) and name not in expected]
    return fitting, missing, unexpected, reshaped


def _optimizer_entries(stored: Mapping[str, TensorLayout]) -> dict[str, dict[str, TensorLayout]]:
    entries: dict[str, dict[str, TensorLayout]] = {}
    for name, layout in stored.items():
        if name.startswith(OPTIM):
            parameter, _, key = name.removeprefix(OPTIM).rpartition(".")
            entries.setdefault(parameter, {})[key] = layout
    return entries


def _fits(shape: tuple[int, ...], entries: Mapping[str, TensorLayout]) -> bool:
    """State of a parameter has its shape, or is a number as ``step``."""
    return all(layout.shape in (shape, ()) for layout in entries.values())
