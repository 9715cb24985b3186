"""Turns any exception of a training thread into a plain FailureCause, so that nothing of the thread stays alive.

A kept exception keeps its traceback, the traceback its frames, and a frame the model. So the picture is text only, and
the frames are cleared here. Whether a cause is worth a retry is the failure policy's question.
"""

from __future__ import annotations

import errno
import re
import traceback

import torch
import torch.distributed as dist

from storage.errors import CorruptCheckpoint, ManifestMismatch, MemoryUnreadable, StorageError
from storage.keys import StepKey
from workers.contract import CauseKind, FailureCause
from workers.data_errors import DataError, DatasetChanged
from workers.errors import AttemptAbandoned, FormingFailed, NotReproducible, RanksDisagree, StepRejected

__all__ = ["cause_of", "classify"]

_MAX_TEXT = 20_000
_COLLECTIVE_TYPES = (dist.DistError, FormingFailed, RanksDisagree)
# gloo, and torch once a group was closed under a waiting call, raise bare RuntimeError or ValueError.
_COLLECTIVE_TEXT = re.compile(
    r"gloo[/\\]|\bNCCL\b|ncclUnhandled|Connection (closed|reset) by peer|Process ?group"
    r"|Timed out waiting \d+ms for (send|recv)|Application timeout caused pair closure|default process group",
    re.IGNORECASE,
)
# torch's CPU allocator, CUDA below torch's own allocator, and C++ in general raise bare RuntimeError.
_OUT_OF_MEMORY_TEXT = re.compile(
    r"can't allocate memory|cannot allocate memory|out of memory|bad_alloc|can't start new thread", re.IGNORECASE
)
# What a device says of itself. An illegal address, a failed launch or an assertion may be a kernel's own fault.
_DEVICE_TEXT = re.compile(
    r"(CUDA|HIP) error: .*(uncorrectable|hardware|no \S+capable device|busy or unavailable|not yet initialized)",
    re.IGNORECASE,
)


def classify(error: BaseException) -> CauseKind:
    """The kind of trouble, by the type of the exception (by its text only for what gloo and torch raise untyped)."""
    if isinstance(error, AttemptAbandoned):
        return CauseKind.ABANDONED
    if isinstance(error, CorruptCheckpoint):
        return CauseKind.CORRUPT_CHECKPOINT
    if isinstance(error, ManifestMismatch):
        return CauseKind.CHECKPOINT_MISMATCH
    if isinstance(error, MemoryUnreadable):
        return CauseKind.MEMORY
    if isinstance(error, StorageError):
        return CauseKind.STORAGE
    if isinstance(error, (NotReproducible, DatasetChanged)):
        return CauseKind.CONFIGURATION
    if isinstance(error, DataError):
        return CauseKind.DATA
    if isinstance(error, StepRejected):
        return CauseKind.BAD_STEP
    if _is_out_of_memory(error):
        return CauseKind.OUT_OF_MEMORY
    if isinstance(error, RuntimeError) and not isinstance(error, dist.DistError) and _DEVICE_TEXT.search(str(error)):
        return CauseKind.ACCELERATOR
    if isinstance(error, _COLLECTIVE_TYPES) or _is_untyped_collective_error(error):
        return CauseKind.COLLECTIVE
    return CauseKind.USER


def cause_of(error: BaseException, *, rank: int, step: int, loaded: StepKey | None, is_abandoned: bool) -> FailureCause:
    """The plain picture of ``error``; clears its frames. ``loaded`` is the Checkpoint this Attempt was reading."""
    kind = CauseKind.ABANDONED if is_abandoned else classify(error)
    corrupt = error if isinstance(error, CorruptCheckpoint) else None
    rejected = error if isinstance(error, StepRejected) else None
    cause = FailureCause(
        kind=kind,
        error_type=type(error).__name__,
        message=_shortened(str(error) or repr(error)),
        traceback=_shortened("".join(traceback.format_exception(error))),
        rank=rank,
        step=step if rejected is None else rejected.step,
        corrupt_step=loaded if corrupt is not None else None,
        corrupt_key=corrupt.key if corrupt is not None else None,
        windows=rejected.windows if rejected is not None else (),
    )
    _clear_frames(error)
    return cause


def _is_untyped_collective_error(error: BaseException) -> bool:
    return type(error) in (RuntimeError, ValueError, AssertionError) and bool(_COLLECTIVE_TEXT.search(str(error)))


def _is_out_of_memory(error: BaseException) -> bool:
    """A thread that cannot be started counts too: its stack could not be had."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and bool(_OUT_OF_MEMORY_TEXT.search(str(error)))


def _clear_frames(error: BaseException) -> None:
    """Drop the local variables of every frame that the error, and what it was raised from, passed through."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
        pending.extend((one.__cause__, one.__context__))


def _shortened(text: str) -> str:
    """The end matters most: that is where the error itself stands."""
    return (
        text if len(text) <= _MAX_TEXT else f"... {len(text) - _MAX_TEXT} characters left out ...\n{text[-_MAX_TEXT:]}"
    )
