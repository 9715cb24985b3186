"""Exceptions become plain values: the right kind, and nothing kept alive."""

from __future__ import annotations

import errno
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from storage.errors import CorruptCheckpoint, ManifestMismatch, MemoryUnreadable, StorageError, StoreUnavailable
from storage.keys import Attempt, StepKey
from workers.contract import CauseKind
from workers.data_errors import DataError
from workers.errors import AttemptAbandoned, FormingFailed, LoopMisused, NotReproducible, RanksDisagree
from workers.failure_cause import cause_of, classify

LOADED = StepKey(step=40, attempt=Attempt(number=2, nonce="0123abcd"))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), "COLLECTIVE"),
        (RuntimeError("Timed out waiting 15000ms for recv operation to complete"), "COLLECTIVE"),
        (ValueError("Default process group has not been initialized"), "COLLECTIVE"),
        (dist.DistBackendError("NCCL error"), "COLLECTIVE"),
        (dist.DistNetworkError("connection refused"), "COLLECTIVE"),
        (FormingFailed("a000001-00000000", 0, 3, 2, 5.0), "COLLECTIVE"),
        (RanksDisagree(0, 3, 2.5), "COLLECTIVE"),
        (CorruptCheckpoint(40, "shards/x", "hash mismatch"), "CORRUPT_CHECKPOINT"),
        (ManifestMismatch(40, missing=("model.x",)), "CHECKPOINT_MISMATCH"),
        (StoreUnavailable("get", "x", "503"), "STORAGE"),
        (StorageError("refused"), "STORAGE"),
        (MemoryUnreadable(41, 2, "node x", "gone"), "MEMORY"),
        (DataError("token id 70000", "train-00000.parquet"), "DATA"),
        (AttemptAbandoned("a000001-00000000", "over"), "ABANDONED"),
        (ValueError("in the user's code"), "USER"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "USER"),
        (CheckpointException("load", {}), "USER"),
        (LoopMisused("twice"), "USER"),
        (NotReproducible("fused"), "CONFIGURATION"),
        (SystemExit(3), "USER"),
        (KeyboardInterrupt(), "USER"),
        (MemoryError(), "OUT_OF_MEMORY"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "OUT_OF_MEMORY"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), "OUT_OF_MEMORY"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "OUT_OF_MEMORY"),
        (RuntimeError("can't start new thread"), "OUT_OF_MEMORY"),
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nSearch for ..."), "ACCELERATOR"),
        (RuntimeError("CUDA error: no CUDA-capable device is detected"), "ACCELERATOR"),
        (RuntimeError("HIP error: uncorrectable ECC error encountered"), "ACCELERATOR"),
        (torch.AcceleratorError("CUDA error: device-side assert triggered\nno hardware is meant"), "USER"),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), "USER"),
        (ValueError("CUDA error: uncorrectable"), "USER"),
        (OSError(errno.ENOSPC, "No space left on device"), "USER"),
        (ValueError("a text about being out of memory"), "USER"),
    ],
)
def test_each_error_has_its_kind(error: BaseException, kind: str) -> None:
    assert classify(error) is CauseKind[kind]


class Heavy:
    """Stands for a model held by a frame."""


def raise_with_a_local(reference: list[weakref.ref[Heavy]]) -> None:
    heavy = Heavy()
    reference.append(weakref.ref(heavy))
    try:
        raise KeyError("first")
    except KeyError as first:
        raise ValueError("the user's own") from first


def test_the_picture_keeps_the_text_and_lets_go_of_every_frame() -> None:
    reference: list[weakref.ref[Heavy]] = []
    try:
        raise_with_a_local(reference)
    except ValueError as error:
        kept = error
        cause = cause_of(error, rank=1, step=7, loaded=None, is_abandoned=False)
    gc.collect()
    assert reference[0]() is None
    assert kept.__traceback__ is None
    assert (cause.kind, cause.error_type, cause.message) == (CauseKind.USER, "ValueError", "the user's own")
    assert (cause.rank, cause.step) == (1, 7)
    assert "raise_with_a_local" in cause.traceback
    assert "first" in cause.traceback
    assert pickle.loads(pickle.dumps(cause)) == cause


def test_a_corrupt_checkpoint_is_named_by_step_and_object() -> None:
    error = CorruptCheckpoint(40, "shards/step-0000000040/x.shard", "hash mismatch", 2)
    cause = cause_of(error, rank=0, step=41, loaded=LOADED, is_abandoned=False)
    assert (cause.corrupt_step, cause.corrupt_key) == (LOADED, "shards/step-0000000040/x.shard")


def test_what_an_abandoned_thread_runs_into_is_not_its_fault() -> None:
    cause = cause_of(RuntimeError("gloo/transport"), rank=0, step=1, loaded=LOADED, is_abandoned=True)
    assert (cause.kind, cause.corrupt_step) == (CauseKind.ABANDONED, None)


def test_an_endless_message_is_cut_and_its_end_kept() -> None:
    cause = cause_of(ValueError("x" * 100_000 + "end"), rank=0, step=1, loaded=None, is_abandoned=False)
    assert len(cause.message) < 30_000
    assert cause.message.endswith("end")


def test_an_error_without_text_still_says_what_it_is() -> None:
    assert "MemoryError" in cause_of(MemoryError(), rank=0, step=1, loaded=None, is_abandoned=False).message
