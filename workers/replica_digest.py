"""Digests of what several ranks hold alike, put into each rank's part of a Snapshot for the Commit to compare.

A digest is taken of the living memory that is copied, beside training where the copy is. It says whether replicas
agree, not what they should be; judging them is `storage.replicas`' work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
import xxhash
from pydantic import JsonValue

from storage.replicas import DIGEST_DIGITS, DIGESTS, NAMES

__all__ = ["Replicas", "digests", "fingerprint", "names_of", "unfilled"]

Replicas = Mapping[str, Mapping[str, torch.Tensor]]
"""By label of the set of ranks that hold them alike: living tensors by stored name."""

_COLUMNS: Final = 1024
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def unfilled(replicas: Replicas) -> dict[str, JsonValue]:
    """What stands in a rank's plain state until the digests are known, of their very length."""
    return {DIGESTS: {label: "0" * (DIGEST_DIGITS * len(tensors)) for label, tensors in replicas.items()}}


def digests(replicas: Replicas) -> dict[str, JsonValue]:
    """And the digests: of each label one string, tensor by tensor in the order of names."""
    return {
        DIGESTS: {
            label: "".join(fingerprint(tensors[name]) for name in sorted(tensors))
            for label, tensors in replicas.items()
        }
    }


def names_of(replicas: Replicas) -> dict[str, JsonValue]:
    """Which tensors the digests are of. One rank says it for all."""
    return {NAMES: {label: list[JsonValue](sorted(tensors)) for label, tensors in replicas.items()}}


def fingerprint(tensor: torch.Tensor) -> str:
    """Eight digits that differ when a bit does. A tensor on a device is summed up there, and little of it copied."""
    with torch.no_grad():
        content = tensor.detach().contiguous().reshape(-1)
        if not content.is_cpu:
            content = _sums(content)
        return f"{xxhash.xxh3_64_intdigest(content.view(torch.uint8).numpy().data) >> 32:08x}"


def _sums(flat: torch.Tensor) -> torch.Tensor:
    """Row and column sums of the words of ``flat``, on the CPU: what moves within it changes them, too."""
    words = flat.view(_WORDS[flat.element_size()]) if flat.element_size() in _WORDS else flat.view(torch.uint8)
    num_square = words.numel() // _COLUMNS * _COLUMNS
    square, rest = words[:num_square].view(-1, _COLUMNS), words[num_square:]
    sums = (square.sum(0, dtype=torch.int64), square.sum(1, dtype=torch.int64), rest.to(torch.int64))
    return torch.cat(sums).cpu()
