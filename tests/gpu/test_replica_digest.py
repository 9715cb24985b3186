"""A digest taken on a CUDA device is that of the same sums on the CPU, and sees one bit."""

from __future__ import annotations

import pytest
import torch

from workers.replica_digest import _sums, fingerprint

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_sums_as_the_host_does(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randint(0, 256, (100_003 * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
    there = tensor.cuda()
    assert torch.equal(_sums(there), _sums(tensor))
    before = fingerprint(there)
    there.view(torch.uint8)[77_777] ^= 16
    assert fingerprint(there) != before
