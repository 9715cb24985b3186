"""What differs between two Checkpoints as their Manifests describe them. Pure: no Shard is read.

Tensors are compared by name, shape, type and Level; plain state and metadata path by path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from storage.manifest import Manifest, TensorLayout

__all__ = ["ManifestDiff", "ValueChange", "diff_manifests"]

_MISSING = object()
_MAX_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueChange:
    """One value at ``path`` (dotted) that is not the same; None on the side that lacks it, where ``is_added`` or
    ``is_removed`` says so."""

    path: str
    before: JsonValue
    after: JsonValue
    is_added: bool = False
    is_removed: bool = False

    def __str__(self) -> str:
        if self.is_added:
            return f"{self.path}: only in B: {_shown(self.after)}"
        if self.is_removed:
            return f"{self.path}: only in A: {_shown(self.before)}"
        return f"{self.path}: {_shown(self.before)} -> {_shown(self.after)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestDiff:
    """Names and values that differ. ``common``: tensors whose values can be compared element by element."""

    metadata: tuple[ValueChange, ...]
    state: tuple[ValueChange, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    reshaped: tuple[str, ...]
    retyped: tuple[str, ...]
    releveled: tuple[str, ...]
    common: tuple[str, ...]

    @property
    def has_same_layout(self) -> bool:
        return not (self.added or self.removed or self.reshaped or self.retyped)


def _shown(value: JsonValue) -> str:
    """Long text, as the ledger is, by its end: that is where it grows."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:20]} ... {text[-_MAX_SHOWN:]}"


def diff_manifests(before: Manifest, after: Manifest) -> ManifestDiff:
    """Compare A (``before``) with B (``after``)."""
    both = sorted(set(before.tensors) & set(after.tensors))
    pairs = [(name, before.tensors[name], after.tensors[name]) for name in both]
    return ManifestDiff(
        metadata=tuple(_changes("", _facts(before), _facts(after))),
        state=tuple(_changes("", before.shared_state, after.shared_state)),
        added=tuple(sorted(set(after.tensors) - set(before.tensors))),
        removed=tuple(sorted(set(before.tensors) - set(after.tensors))),
        reshaped=tuple(f"{name}: {a.shape} -> {b.shape}" for name, a, b in pairs if a.shape != b.shape),
        retyped=tuple(f"{name}: {a.dtype} -> {b.dtype}" for name, a, b in pairs if a.dtype != b.dtype),
        releveled=tuple(f"{name}: {_kept(a)} -> {_kept(b)}" for name, a, b in pairs if _kept(a) != _kept(b)),
        common=tuple(name for name, a, b in pairs if a.shape == b.shape),
    )


def _kept(layout: TensorLayout) -> str:
    bound = getattr(layout, "bound", None)
    return layout.level if bound is None else f"{layout.level} within {bound:g}"


def _facts(manifest: Manifest) -> dict[str, JsonValue]:
    return {
        "run_id": manifest.run_id,
        "step": manifest.step,
        "attempt": manifest.attempt.number,
        "world_size": manifest.world_size,
        "time_utc": manifest.time_utc,
        "samples": manifest.ledger.position if manifest.ledger else None,
        "metadata": manifest.metadata,
    }


def _changes(path: str, before: object, after: object) -> Iterator[ValueChange]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted(set(before) | set(after)):
            yield from _changes(
                f"{path}.{key}" if path else str(key), before.get(key, _MISSING), after.get(key, _MISSING)
            )
    elif before is _MISSING:
        yield ValueChange(path=path, before=None, after=after, is_added=True)  # type: ignore[arg-type]  # JSON
    elif after is _MISSING:
        yield ValueChange(path=path, before=before, after=None, is_removed=True)  # type: ignore[arg-type]  # JSON
    elif before != after and not (before != before and after != after):
        yield ValueChange(path=path, before=before, after=after)  # type: ignore[arg-type]  # both are JSON
