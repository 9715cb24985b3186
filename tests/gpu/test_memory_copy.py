"""A copy into memory beside a CUDA stream that goes on: what is kept is the state of the step, not a later one."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from storage.dcp_writer import local_parts
from tests.fakes.memory_keeper import MemoryKeeper
from tests.fakes.small_training import ATTEMPT, RUN_ID
from workers.snapshot import Capture
from workers.staging import Stager

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_draft_copied_by_another_thread_sees_all_that_was_queued_before_it(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(1 << 22, device="cuda"))
    buffer = torch.zeros(1000, device="cuda")
    stager = Stager(MemoryKeeper(tmp_path), RUN_ID, os.getpid())
    with torch.no_grad():
        for _ in range(200):  # still running when the draft is made
            weight.add_(1.0)
            buffer.add_(1.0)
    captured = Capture(tensors={"model.weight": weight, "model.buffer": buffer}, shared_state={}, rank_state={})
    draft = stager.draft_apart(captured, attempt=ATTEMPT, step=1, rank=0, world_size=1)
    buffer.fill_(-1.0)
    content = memoryview(bytearray(draft.num_bytes))
    copying = threading.Thread(target=draft.fill, args=(content,))
    copying.start()
    copying.join(60.0)
    with torch.no_grad():
        weight.fill_(-1.0)
    assert set(local_parts(captured.tensors)) == {chunk.name for chunk in draft.layout.chunks}
    for chunk in draft.layout.chunks:
        values = np.frombuffer(content, np.float32, chunk.num_bytes // 4, chunk.data_offset)
        assert set(values.tolist()) == {200.0}, chunk.name
