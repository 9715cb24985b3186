"""Digests see every bit, and a Snapshot says them in its header. Real: the copy; no Keeper, no group."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from storage.direct import DirectKeeper
from storage.errors import StorageError
from storage.keeper_protocol import KeeperPort
from storage.replicas import DIGESTS, NAMES
from storage.snapshot_format import SnapshotHeader, read_header
from tests.fakes.small_training import ATTEMPT, RUN_ID
from workers.replica_digest import _sums, digests, fingerprint, unfilled
from workers.snapshot import Capture
from workers.staging import Draft, Stager

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.complex64, torch.int64]


def filled(dtype: torch.dtype, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    num_bytes = count * dtype.itemsize
    limit = 2 if dtype is torch.bool else 256
    return torch.randint(0, limit, (num_bytes,), generator=generator, dtype=torch.uint8).view(dtype)


def with_a_bit_flipped(tensor: torch.Tensor, byte: int) -> torch.Tensor:
    other = tensor.clone()
    other.view(torch.uint8).flatten()[byte] ^= 1
    return other


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 1023, 5000])
def test_one_bit_anywhere_changes_digest_and_sums(dtype: torch.dtype, count: int) -> None:
    tensor = filled(dtype, count)
    num_bytes = count * dtype.itemsize
    for byte in {0, num_bytes // 2, num_bytes - 1}:
        other = with_a_bit_flipped(tensor, byte)
        assert fingerprint(other) != fingerprint(tensor)
        assert not torch.equal(_sums(other), _sums(tensor))
    assert fingerprint(tensor.clone()) == fingerprint(tensor)
    assert torch.equal(_sums(tensor.clone()), _sums(tensor))


def test_sums_see_rows_and_columns_that_change_places() -> None:
    tensor = filled(torch.float32, 8 * 1024)
    rows, columns = tensor.view(8, 1024)[[1, 0, *range(2, 8)]], tensor.view(8, 1024)[:, [1, 0, *range(2, 1024)]]
    assert len({_sums(one.flatten()).numpy().tobytes() for one in (tensor, rows, columns)}) == 3
    assert _sums(tensor).numel() < tensor.numel() / 7


@pytest.mark.parametrize("tensor", [torch.tensor(3.0), torch.zeros(0), torch.arange(12.0).view(3, 4).T])
def test_odd_shapes_have_a_digest(tensor: torch.Tensor) -> None:
    assert len(fingerprint(tensor)) == 8
    assert fingerprint(tensor) == fingerprint(tensor.contiguous())


def drafted(*, rank: int = 0, is_apart: bool = False, compares: bool = True) -> tuple[Draft, dict[str, torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = {
        "model.a": torch.nn.Parameter(torch.ones(5)),
        "model.b": torch.nn.Parameter(torch.zeros(2, 2)),
        "optim.a.exp_avg": torch.ones(5),
    }
    written = {"model.a": tensors["model.a"]} if rank == 0 else {"model.b": tensors["model.b"]}
    captured = Capture(
        tensors=written,
        shared_state={} if rank == 0 else None,
        rank_state={"rank": rank},
        replicas={"whole": tensors},
    )
    keeper = cast(KeeperPort, DirectKeeper)  # drafting asks nothing of it
    stager = Stager(keeper, RUN_ID, 1, compares_replicas=compares)
    make = stager.draft_apart if is_apart else stager.draft
    return make(captured, attempt=ATTEMPT, step=3, rank=rank, world_size=2), tensors


def header_of(draft: Draft) -> SnapshotHeader:
    buffer = bytearray(draft.num_bytes)
    draft.fill(memoryview(buffer))
    return read_header(buffer)


@pytest.mark.parametrize("is_apart", [False, True])
def test_the_header_says_the_digests_of_what_is_written_and_of_what_is_not(is_apart: bool) -> None:
    by_rank = [header_of(drafted(rank=rank, is_apart=is_apart)[0]).rank_state for rank in range(2)]
    _, tensors = drafted()
    expected = "".join(fingerprint(tensors[name]) for name in ("model.a", "model.b", "optim.a.exp_avg"))
    assert [state[DIGESTS] for state in by_rank] == [{"whole": expected}] * 2
    assert by_rank[0][NAMES] == {"whole": sorted(tensors)}
    assert NAMES not in by_rank[1]


def test_placeholders_are_as_long_as_the_digests() -> None:
    _, tensors = drafted()
    before, after = unfilled({"whole": tensors}), digests({"whole": tensors})
    assert before != after
    assert len(str(before)) == len(str(after))


def test_a_replica_that_changes_while_training_goes_on_beside_its_digest_is_refused() -> None:
    """Also one that another rank writes."""
    draft, tensors = drafted(rank=0, is_apart=True)
    with torch.no_grad():
        tensors["model.b"].add_(1)
    with pytest.raises(StorageError, match=r"model\.b and 0 more tensors changed while they were copied"):
        draft.fill(memoryview(bytearray(draft.num_bytes)))


def test_nothing_is_digested_where_that_is_turned_off() -> None:
    draft, _ = drafted(compares=False)
    assert header_of(draft).rank_state == {"rank": 0}
