"""Errors of the storage package: one root, each says what failed, for which key, what was expected and what to do.

They survive pickling: every field is a constructor argument kept in ``args``.
"""

from __future__ import annotations

__all__ = [
    "CommitRefused",
    "CorruptCheckpoint",
    "KeeperRefused",
    "KeeperUnreachable",
    "LeaseHeld",
    "ManifestMismatch",
    "MemoryUnreadable",
    "ObjectExists",
    "ObjectMissing",
    "ProofFailed",
    "StorageError",
    "StoreRefused",
    "StoreUnavailable",
]


class StorageError(Exception):
    """Root of every error this package raises on purpose."""


class ObjectMissing(StorageError):
    """An object that must exist does not. ``key`` names it."""

    def __init__(self, key: str, where: str = "") -> None:
        super().__init__(key, where)
        self.key, self.where = key, where

    def __str__(self) -> str:
        return f"object {self.key} is missing{' in ' + self.where if self.where else ''}"


class ObjectExists(StorageError):
    """A create-only write found an object of that name. ``key`` names it."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return f"object {self.key} exists already"


class StoreUnavailable(StorageError):
    """The store did not answer as it should within the deadline and the retries. Not evidence of absence."""

    def __init__(self, operation: str, key: str, reason: str) -> None:
        super().__init__(operation, key, reason)
        self.operation, self.key, self.reason = operation, key, reason

    def __str__(self) -> str:
        return f"store: {self.operation} {self.key} failed: {self.reason}"


class StoreRefused(StoreUnavailable):
    """The store answered, and asking again will not change it: access denied, no such bucket. Never retried."""


class CorruptCheckpoint(StorageError):
    """Stored bytes of one step are not what was committed. ``key`` names the object, ``step`` the Checkpoint."""

    def __init__(self, step: int, key: str, reason: str, rank: int | None = None) -> None:
        super().__init__(step, key, reason, rank)
        self.step, self.key, self.reason, self.rank = step, key, reason, rank

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" (written by rank {self.rank})"
        return f"checkpoint of step {self.step}: {self.key}{rank}: {self.reason}"


class ProofFailed(CorruptCheckpoint):
    """Bytes that are those that were committed, yet not the state that was saved: the probe gives another loss.

    ``key``: of its Manifest.
    """


class MemoryUnreadable(StorageError):
    """The Snapshot of ``rank`` at ``step`` cannot be read from any memory in the plan, or is not what was sealed.

    Says nothing about a Checkpoint of the same step: only this generation must not be planned with again.
    """

    def __init__(self, step: int, rank: int, place: str, reason: str) -> None:
        super().__init__(step, rank, place, reason)
        self.step, self.rank, self.place, self.reason = step, rank, place, reason

    def __str__(self) -> str:
        return f"step {self.step} in memory: the Snapshot of rank {self.rank} at {self.place}: {self.reason}"


class ManifestMismatch(StorageError):
    """The model or config that wants to load does not match what was saved; each list names what differs."""

    def __init__(
        self,
        step: int,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        reshaped: tuple[str, ...] = (),
    ) -> None:
        super().__init__(step, missing, unexpected, reshaped)
        self.step, self.missing, self.unexpected, self.reshaped = step, missing, unexpected, reshaped

    def __str__(self) -> str:
        def part(title: str, names: tuple[str, ...]) -> str:
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            return f"; {title} ({len(names)}): {shown}" if names else ""

        return (
            f"checkpoint of step {self.step} does not match the model"
            f"{part('missing in the checkpoint', self.missing)}"
            f"{part('unexpected in the checkpoint', self.unexpected)}{part('reshaped', self.reshaped)}"
            "; load with allow_partial to take what fits"
        )


class CommitRefused(StorageError):
    """A Commit was not written: the Attempt is fenced off, or the Receipts do not make a whole Checkpoint."""


class LeaseHeld(StorageError):
    """Another driver holds the Run's Lease."""

    def __init__(self, run: str, owner: str) -> None:
        super().__init__(run, owner)
        self.run, self.owner = run, owner

    def __str__(self) -> str:
        return f"run {self.run} is driven by another driver ({self.owner}); this one writes nothing and stops"


class KeeperRefused(StorageError):
    """A node's Keeper raised while it was made, as it would again: no disk where ``local_disk.mode`` is on, say."""

    def __init__(self, node_id: str, reason: str) -> None:
        super().__init__(node_id, reason)
        self.node_id, self.reason = node_id, reason

    def __str__(self) -> str:
        return f"node {self.node_id}: its Keeper cannot be made: {self.reason}"


class KeeperUnreachable(StorageError):
    """The Keeper of this node does not answer; another one may be on its way. Training can go on without it."""

    def __init__(self, verb: str, reason: str) -> None:
        super().__init__(verb, reason)
        self.verb, self.reason = verb, reason

    def __str__(self) -> str:
        return f"Keeper: no answer to {self.verb}: {self.reason}"
