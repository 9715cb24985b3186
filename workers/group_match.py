"""Which saved param group each present one continues, by the names of its parameters, never by position.

A group continues the saved one with the very same parameters, in whatever order both stand. Where parameters have
changed groups (another split of weight decay) nothing says whose settings hold, so that is refused by their names.
Pure: nothing is set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from workers.plain_state import numbers

__all__ = ["LOCAL_SETTINGS", "GroupMatch", "changed_settings", "match_groups"]

# How a step is computed, not what: these follow the machine that resumes, not the one that saved.
LOCAL_SETTINGS: Final = frozenset({"foreach", "fused", "capturable", "differentiable"})
# These move during training, so a difference from what was built says nothing.
_MOVING: Final = frozenset({"lr", "initial_lr", "params", "param_names", "momentum", "max_lr", "min_lr"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMatch:
    """``order``: for each present group the index of the saved one that it continues, None: of none.
    ``moved``: parameters that were in another group, each with both."""

    order: tuple[int | None, ...]
    moved: tuple[str, ...]


def match_groups(
    names: Sequence[Sequence[str]], settings: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> GroupMatch:
    """``names`` and ``settings`` of the present groups; ``saved``: ``names`` and ``settings`` each.

    Parameters that only one side has do not count here: they are missing or unexpected by themselves.
    """
    common = {name for group in names for name in group} & {name for group in saved for name in group["names"]}
    here = [set(group) & common for group in names]
    there = [set(group["names"]) & common for group in saved]
    partners = _partners(here, there)
    order = tuple(
        index if index is not None and own == there[index] and _is_one(own, index, partners, names, saved) else None
        for own, index in zip(here, partners, strict=True)
    )
    moved = [
        _said(name, there, saved, position, settings)
        for position, (own, index) in enumerate(zip(here, partners, strict=True))
        for name in sorted(own - (there[index] if index is not None else set()))
    ]
    return GroupMatch(order=order, moved=tuple(moved))


def _partners(here: Sequence[Collection[str]], there: Sequence[Collection[str]]) -> list[int | None]:
    """For each present group the saved one that it shares the most with; no saved one twice. Both hold the same
    names."""
    place = {name: index for index, other in enumerate(there) for name in other}
    shared = sorted(
        (-count, position, index)
        for position, own in enumerate(here)
        for index, count in Counter(place[name] for name in own).items()
    )
    found: list[int | None] = [None] * len(here)
    taken: set[int] = set()
    for _, position, index in shared:
        if found[position] is None and index not in taken:
            found[position] = index
            taken.add(index)
    _pair_the_empty(found, taken, here, there)
    return found


def _pair_the_empty(
    found: list[int | None], taken: set[int], here: Sequence[Collection[str]], there: Sequence[Collection[str]]
) -> None:
    """Groups without parameters have nothing but their place."""
    left = [index for index, other in enumerate(there) if not other and index not in taken]
    for position, own in enumerate(here):
        if not own and left:
            found[position] = left.pop(0)


def _is_one(
    own: Collection[str],
    index: int,
    partners: Sequence[int | None],
    names: Sequence[Sequence[str]],
    saved: Sequence[Mapping[str, Any]],
) -> bool:
    """A group that has nothing in common with any saved one continues an empty one only if it is empty itself."""
    position = partners.index(index)
    return bool(own) or (not names[position] and not saved[index]["names"])


def _said(
    name: str,
    there: Sequence[Collection[str]],
    saved: Sequence[Mapping[str, Any]],
    position: int,
    settings: Sequence[Mapping[str, Any]],
) -> str:
    index = next(number for number, group in enumerate(there) if name in group)
    before, after = dict(saved[index]["settings"]), numbers(dict(settings[position]))
    keys = [key for key in changed_settings(before, after) if key in before and key in after]
    was = "".join(f", {key} {before[key]}" for key in keys)
    now = "".join(f", {key} {after[key]}" for key in keys)
    return f"{name} (saved in group {index}{was}; here in group {position}{now})"


def changed_settings(saved: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of settings that say something else in both, but for those that move during training or are local."""
    keys = (key for key in saved if key in here and key not in _MOVING | LOCAL_SETTINGS)
    return tuple(key for key in keys if _plain(saved[key]) != _plain(here[key]))


def _plain(value: Any) -> Any:
    value = numbers(value)
    return list(value) if isinstance(value, tuple) else value
