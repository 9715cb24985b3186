"""When memory counts as nearly full. Real: this machine's files; a device's memory only in tests/gpu."""

from __future__ import annotations

import pytest
import torch

from workers.memory_pressure import MemoryLook, MemoryPressure, device_bytes_in_use
from workers.settings import SignalSettings

SETTINGS = SignalSettings(every_steps=3, device_share=0.9, host_share=0.8)


def look(device: float | None, host: float) -> MemoryLook:
    pressure = MemoryPressure(torch.device("cpu"), SETTINGS, device_share=lambda _: device, host_share=lambda: host)
    return pressure.look()


@pytest.mark.parametrize(
    ("device", "host", "share", "is_pressed"),
    [
        (None, 0.5, 0.5, False),
        (None, 0.8, 0.8, True),
        (0.89, 0.1, 0.89, False),
        (0.9, 0.1, 0.9, True),
        (0.3, 0.85, 0.85, True),
    ],
)
def test_the_fuller_memory_is_told_and_each_has_its_own_limit(
    device: float | None, host: float, share: float, is_pressed: bool
) -> None:
    assert look(device, host) == MemoryLook(share=share, is_pressed=is_pressed)


def test_the_cpu_has_no_device_memory_and_this_machine_a_share_in_use() -> None:
    assert device_bytes_in_use(torch.device("cpu")) is None
    assert 0 < MemoryPressure(torch.device("cpu"), SETTINGS).look().share < 1


def test_what_is_measured_is_measured_every_so_many_steps() -> None:
    assert [step for step in range(1, 10) if SETTINGS.measures(step)] == [3, 6, 9]
