"""How full this rank's memory is, the device's and the host's, and when that counts as pressed.

A look costs a few small files and one call of the driver: it allocates nothing on the device and waits for nothing.
What follows from pressure is the save policy's question.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from storage.host_memory import used_share
from workers.settings import SignalSettings

__all__ = ["MemoryLook", "MemoryPressure", "device_bytes_in_use"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLook:
    """``share``: the larger of the two shares in use."""

    share: float
    is_pressed: bool


class MemoryPressure:
    """One rank's. ``device_share``, ``host_share``: how to learn the shares in use; a device may have no memory of its
    own."""

    def __init__(
        self,
        device: torch.device,
        settings: SignalSettings,
        *,
        device_share: Callable[[torch.device], float | None] | None = None,
        host_share: Callable[[], float] = used_share,
    ) -> None:
        self._device, self._settings = device, settings
        self._device_share = _device_share if device_share is None else device_share
        self._host_share = host_share

    def look(self) -> MemoryLook:
        device, host = self._device_share(self._device), self._host_share()
        limits = self._settings
        is_pressed = host >= limits.host_share or (device is not None and device >= limits.device_share)
        return MemoryLook(share=max(host, device or 0.0), is_pressed=is_pressed)


def device_bytes_in_use(device: torch.device) -> tuple[int, int] | None:
    """Bytes of the device in use, by all its processes, and its size; None for a device without memory of its own.

    What the allocator keeps beyond its highest need so far is free for it: it gives it back before it fails.
    """
    if device.type != "cuda":
        return None
    free, size = torch.cuda.mem_get_info(device)
    spare = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return size - free - max(0, spare), size


def _device_share(device: torch.device) -> float | None:
    used = device_bytes_in_use(device)
    return None if used is None else used[0] / used[1]
