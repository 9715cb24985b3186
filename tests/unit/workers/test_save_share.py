"""What one save takes of the memory in use, and when it says why. The device's count and its memory are scripted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from storage.keys import Attempt
from tests.fakes.memory_keeper import MemoryKeeper
from workers.contract import ShareReport
from workers.save_share import LARGE_SHARE, ShareMeter, host_bytes_in_use
from workers.snapshot import Capture
from workers.staging import Drafted, Stager

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
ATTEMPT = Attempt(number=1, nonce="0badcafe")
WEIGHTS, MOMENTS = 4000, 8000


class Device:
    """A device whose memory and allocator's count a test sets."""

    def __init__(self, in_use_bytes: int) -> None:
        self.in_use_bytes, self.allocated_bytes = in_use_bytes, 5_000_000

    def meter(self, told: list[ShareReport], device: torch.device = CUDA) -> ShareMeter:
        return ShareMeter(
            device, told.append, in_use=lambda _: self.in_use_bytes, allocated=lambda _: self.allocated_bytes
        )


@pytest.fixture
def drafted(tmp_path: Path) -> Drafted:
    tensors = {
        "model.weight": torch.zeros(WEIGHTS // 2, dtype=torch.bfloat16),
        "optim.weight.exp_avg": torch.zeros(MOMENTS // 4),
    }
    captured = Capture(tensors=tensors, shared_state={}, rank_state={})
    draft = Stager(MemoryKeeper(tmp_path), "run", 1).draft(captured, attempt=ATTEMPT, step=4, rank=0, world_size=1)
    return Drafted.of(draft)


def test_a_save_that_takes_little_of_a_large_device_has_nothing_to_explain(drafted: Drafted) -> None:
    told: list[ShareReport] = []
    device = Device(in_use_bytes=1_000_000)
    meter = device.meter(told)
    before = meter.begin()
    device.allocated_bytes += 2_000
    meter.end(4, before, drafted, is_beside=False)
    (report,) = told
    assert (report.step, report.extra_bytes, report.share, report.is_measured) == (4, 2_000, 0.002, True)
    assert report.snapshot_bytes == drafted.layout.num_bytes >= WEIGHTS + MOMENTS
    assert report.snapshot_share == report.snapshot_bytes / 1_000_000
    assert report.why is None


def test_a_large_snapshot_says_what_it_is_made_of_and_what_the_device_gave_for_its_copy(drafted: Drafted) -> None:
    told: list[ShareReport] = []
    meter = Device(in_use_bytes=20_000).meter(told)
    meter.end(4, meter.begin(), drafted, is_beside=False)
    assert told[0].share == 0.0 < LARGE_SHARE < told[0].snapshot_share
    assert told[0].why == (
        "moments in float32 are 40% and weights in bfloat16 are 20% of the device memory in use; "
        "the copy goes to host memory and took 0 bytes of the device"
    )


def test_a_save_that_takes_much_of_the_device_says_why_although_its_snapshot_is_small(drafted: Drafted) -> None:
    told: list[ShareReport] = []
    device = Device(in_use_bytes=1_000_000)
    meter = device.meter(told)
    before = meter.begin()
    device.allocated_bytes += 200_000
    meter.end(4, before, drafted, is_beside=False)
    assert told[0].share == 0.2
    assert (told[0].why or "").endswith("took 200000 bytes of the device")


def test_a_copy_beside_training_counts_what_it_gathers_on_the_device_not_what_training_allocates(
    drafted: Drafted,
) -> None:
    told: list[ShareReport] = []
    device = Device(in_use_bytes=100_000)
    meter = device.meter(told)
    before = meter.begin()
    device.allocated_bytes += 300  # on the training thread, before the rest is left to the side thread
    meter.end(4, before, Drafted(layout=drafted.layout, passing_bytes=700), is_beside=True)
    device.allocated_bytes += 90_000
    assert (told[0].extra_bytes, told[0].is_measured) == (1_000, False)


def test_on_the_cpu_the_copy_itself_is_what_a_save_takes(drafted: Drafted) -> None:
    told: list[ShareReport] = []
    meter = Device(in_use_bytes=24_000).meter(told, CPU)
    meter.end(4, meter.begin(), drafted, is_beside=False)
    (report,) = told
    assert report.extra_bytes == report.snapshot_bytes
    assert report.share == report.snapshot_share > LARGE_SHARE
    assert "of the process's own memory" in (report.why or "")


def test_it_is_told_once_an_attempt_and_by_no_rank_that_nobody_listens_to(drafted: Drafted) -> None:
    told: list[ShareReport] = []
    meter = Device(in_use_bytes=1_000_000).meter(told)
    before = meter.begin()
    assert before is not None
    for step in (4, 8):
        meter.end(step, before, drafted, is_beside=False)
        before = meter.begin()
    assert (before, [report.step for report in told]) == (None, [4])
    assert ShareMeter(CPU, None).begin() is None


def test_tensors_that_lie_scattered_on_a_device_pass_through_it(tmp_path: Path) -> None:
    tensors = {
        "model.whole": torch.zeros(100, device="meta"),
        "model.column": torch.zeros(10, 30, device="meta").t(),
        "model.host": torch.zeros(100, 100).t(),
    }
    captured = Capture(tensors=tensors, shared_state={}, rank_state={})
    stager = Stager(MemoryKeeper(tmp_path), "run", 1)
    stager.draft(captured, attempt=ATTEMPT, step=1, rank=0, world_size=1)
    assert stager.drafted is not None
    assert stager.drafted.passing_bytes == 10 * 30 * 4


def test_the_memory_in_use_of_a_process_leaves_out_what_it_shares(tmp_path: Path) -> None:
    statm = tmp_path / "statm"
    statm.write_text("9000 700 200 3 0 4 0\n")
    pages = host_bytes_in_use(statm)
    statm.write_text("9000 1200 200 3 0 4 0\n")
    assert host_bytes_in_use(statm) == 2 * pages > 0
    assert host_bytes_in_use() > 0
