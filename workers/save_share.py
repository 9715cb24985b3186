"""How much of the memory in use one save takes: measured at an Attempt's first Snapshot, on one rank.

On a CUDA device the question is what the save takes of the device while it is copied; on the CPU the copy lies in the
same memory as the training. It changes nothing about how a save is taken.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from storage.snapshot_format import StagedChunk
from workers.contract import ShareReport
from workers.memory_pressure import device_bytes_in_use
from workers.snapshot import MODEL, OPTIM
from workers.staging import Drafted

__all__ = ["LARGE_SHARE", "ShareMeter", "host_bytes_in_use"]

LARGE_SHARE: Final = 0.15
"""A save that takes more of the memory in use says why."""
_STATM: Final = Path("/proc/self/statm")
_NUM_NAMED: Final = 2  # parts of a Snapshot that a reason names


@dataclass(frozen=True, slots=True)
class Before:
    """Taken before the first thing that a save does. ``allocated_bytes``: by the device's allocator, since ever."""

    in_use_bytes: int
    allocated_bytes: int


class ShareMeter:
    """One Attempt's. ``tell`` is called once, for the first Snapshot; None: this rank has nobody to tell."""

    def __init__(
        self,
        device: torch.device,
        tell: Callable[[ShareReport], None] | None,
        *,
        in_use: Callable[[torch.device], int] | None = None,
        allocated: Callable[[torch.device], int] | None = None,
    ) -> None:
        self._device, self._tell = device, tell
        self._in_use = _in_use if in_use is None else in_use
        self._allocated = _allocated if allocated is None else allocated

    def begin(self) -> Before | None:
        """Before a Snapshot is taken. None: it is not measured."""
        if self._tell is None:
            return None
        return Before(self._in_use(self._device), self._allocated(self._device))

    def end(self, step: int, before: Before | None, drafted: Drafted, *, is_beside: bool) -> None:
        """The Snapshot of ``step`` is taken. ``is_beside``: most of it is still being copied beside training, and the
        device's count would not tell the two apart."""
        tell = self._tell
        if before is None or tell is None:
            return
        self._tell = None
        extra_bytes = self._allocated(self._device) - before.allocated_bytes
        if is_beside:
            extra_bytes += drafted.passing_bytes
        if self._device.type != "cuda":
            extra_bytes = drafted.layout.num_bytes
        snapshot_share = drafted.layout.num_bytes / before.in_use_bytes
        share = extra_bytes / before.in_use_bytes
        why = None
        if max(share, snapshot_share) > LARGE_SHARE:
            why = self._why(drafted.layout.chunks, extra_bytes, before.in_use_bytes)
        tell(
            ShareReport(
                step=step,
                share=share,
                extra_bytes=extra_bytes,
                snapshot_share=snapshot_share,
                snapshot_bytes=drafted.layout.num_bytes,
                in_use_bytes=before.in_use_bytes,
                is_measured=self._device.type == "cuda" and not is_beside,
                why=why,
            )
        )

    def _why(self, chunks: tuple[StagedChunk, ...], extra_bytes: int, in_use_bytes: int) -> str:
        largest = " and ".join(
            f"{what} are {num_bytes / in_use_bytes:.0%}" for what, num_bytes in _parts(chunks).most_common(_NUM_NAMED)
        )
        if self._device.type == "cuda":
            took = f"the copy goes to host memory and took {extra_bytes} bytes of the device"
            return f"{largest} of the device memory in use; {took}"
        return f"{largest} of the process's own memory; this device has no other, so the copy lies beside the training"


def host_bytes_in_use(statm: Path = _STATM) -> int:
    """Resident memory of this process that it shares with none: buffers of Snapshots, which Keepers map too, left
    out."""
    _, resident, shared = (int(word) for word in statm.read_text().split()[:3])
    return max(1, resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _parts(chunks: tuple[StagedChunk, ...]) -> Counter[str]:
    """Bytes of a Snapshot by what they are."""
    parts: Counter[str] = Counter()
    for chunk in chunks:
        names: Mapping[str, str] = {MODEL: "weights", OPTIM: "moments"}
        what = next((name for prefix, name in names.items() if chunk.name.startswith(prefix)), "other tensors")
        parts[f"{what} in {chunk.dtype}"] += chunk.num_bytes
    return parts


def _in_use(device: torch.device) -> int:
    used = device_bytes_in_use(device)
    return host_bytes_in_use() if used is None else max(1, used[0])


def _allocated(device: torch.device) -> int:
    """All that was ever allocated, freed or not: what is taken for a moment shows as well."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("allocated_bytes.all.allocated", 0))
