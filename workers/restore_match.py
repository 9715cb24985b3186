"""Compares what a Checkpoint holds with what a training state expects, by name.

Pure: it reads no bytes and sets nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from pydantic import JsonValue
from torch.distributed.tensor import DTensor

from storage.dcp_writer import dtype_name
from storage.errors import ManifestMismatch
from storage.manifest import Level, Manifest, TensorLayout
from workers.group_match import GroupMatch, match_groups
from workers.loss_scaling import is_in_use
from workers.names import named_parameters, optimizer_names, persistent_buffers
from workers.optimizer_state import optimizer_kind
from workers.plain_state import from_plain
from workers.rank_trackers import saved_rank_trackers
from workers.schedule import schedule_kind
from workers.snapshot import MODEL, OPTIM, RANK_TRACKER, SCALER, SCHEDULER, TRACKER
from workers.state import TrainingState

__all__ = ["Match", "compare", "restricted", "saved_groups", "section"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What fits and what does not.

    ``model``: tensors to fill, by stored name. ``optimizer``: stored entries of each parameter name, by state key,
    none for one that has only plain values. ``groups``: which saved param group each present one continues.
    ``left_out``: optimizer or schedule of another class, which a partial restore leaves as it was built.
    """

    model: dict[str, torch.Tensor]
    optimizer: dict[str, dict[str, TensorLayout]]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: tuple[str, ...]
    groups: GroupMatch
    left_out: frozenset[str]

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
    groups = cast("list[dict[str, Any]]", section(manifest, "optimizer").get("groups") or [])
    return [{"names": group["names"], "settings": from_plain(group["settings"], {})} for group in groups]


def compare(state: TrainingState, manifest: Manifest, rank: int = 0) -> Match:
    """Match every part of ``state`` of ``rank`` against ``manifest``."""
    model, missing, unexpected, reshaped = _compare_model(state, manifest.tensors)
    by_group = optimizer_names(state.model, state.optimizer)
    names = {name for group in by_group for name in group}
    parameters = {name: parameter for name, parameter in named_parameters(state.model) if name in names}
    stored = _optimizer_entries(manifest)
    saved = {name for group in saved_groups(manifest) for name in group["names"]}
    missing += [f"{OPTIM}{name}" for name in names - saved]
    unexpected += [f"{OPTIM}{name}" for name in (saved | set(stored)) - names]
    misfits = {name for name in names & set(stored) if not _fits(parameters[name], stored[name])}
    reshaped += [f"{OPTIM}{name}" for name in misfits]
    groups = match_groups(by_group, state.optimizer.param_groups, saved_groups(manifest))
    reshaped += [f"{OPTIM}{said}" for said in groups.moved]
    kinds = _other_kinds(state, manifest)
    reshaped += [*kinds.values(), *_rearranged(state, groups)]
    for here, there in _named_parts(state, manifest, rank):
        missing += here - there
        unexpected += there - here
    is_of_this_kind = OPTIM not in kinds
    return Match(
        model=model,
        optimizer={name: stored[name] for name in sorted((names & set(stored)) - misfits)} if is_of_this_kind else {},
        missing=tuple(sorted(missing)),
        unexpected=tuple(sorted(unexpected)),
        reshaped=tuple(sorted(reshaped)),
        groups=groups if is_of_this_kind else GroupMatch(order=(None,) * len(by_group), moved=()),
        left_out=frozenset(kinds),
    )


def _named_parts(state: TrainingState, manifest: Manifest, rank: int) -> Iterator[tuple[set[str], set[str]]]:
    """What is there as a whole or not at all: names here, names in the Checkpoint."""
    yield (
        {f"{TRACKER}{name}" for name in state.trackers},
        {f"{TRACKER}{name}" for name in section(manifest, "trackers")},
    )
    # A rank that was not there when it was saved is to have what every rank has.
    own = saved_rank_trackers(manifest, rank if rank < manifest.world_size else 0)
    yield {f"{RANK_TRACKER}{name}" for name in state.rank_trackers}, {f"{RANK_TRACKER}{name}" for name in own}
    yield {SCALER} if is_in_use(state.scaler) else set(), {SCALER} if section(manifest, SCALER) else set()


def _rearranged(state: TrainingState, groups: GroupMatch) -> Iterator[str]:
    """Groups in another order than they were saved in, where the schedule may keep values by their place."""
    places = [index for index in groups.order if index is not None]
    if places != sorted(places) and not type(state.scheduler).__module__.startswith("torch.optim."):
        yield f"{SCHEDULER} (param groups stand in another order, and {schedule_kind(state.scheduler)} may go by it)"


def _other_kinds(state: TrainingState, manifest: Manifest) -> dict[str, str]:
    """Optimizer and schedule whose class is not the one that was saved: the names of their values mean other things."""
    pairs = {
        OPTIM: (section(manifest, "optimizer").get("kind"), optimizer_kind(state.optimizer)),
        SCHEDULER: (manifest.shared_state.get("scheduler_kind"), schedule_kind(state.scheduler)),
    }
    return {
        name: f"{name.removesuffix('.')} (saved {saved}, here {here})"
        for name, (saved, here) in pairs.items()
        if saved is not None and saved != here  # older Checkpoints do not say
    }


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


def _optimizer_entries(manifest: Manifest) -> dict[str, dict[str, TensorLayout]]:
    plain = section(manifest, "optimizer").get("state")
    entries: dict[str, dict[str, TensorLayout]] = {name: {} for name in plain} if isinstance(plain, dict) else {}
    for name, layout in manifest.tensors.items():
        if name.startswith(OPTIM):
            parameter, _, key = name.removeprefix(OPTIM).rpartition(".")
            entries.setdefault(parameter, {})[key] = layout
    return entries


def _fits(parameter: torch.Tensor, entries: Mapping[str, TensorLayout]) -> bool:
    """State of a parameter has its shape, or is a number as ``step``. Where nothing is sharded it may have any."""
    shape = tuple(parameter.shape)
    return not isinstance(parameter, DTensor) or all(
        layout.shape == shape or math.prod(layout.shape) == 1 for layout in entries.values()
    )
