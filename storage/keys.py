"""Identities and the object names made from them: the only place where a stored name is built or taken apart.

Every name is relative to the Run's root URL. Nothing here reads or writes a store.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

__all__ = [
    "COMMITS",
    "CONTROL",
    "EVENTS",
    "JOURNAL",
    "LEASES",
    "MANIFESTS",
    "MAX_STEP",
    "PROBES",
    "QUARANTINE",
    "RUN",
    "SHARDS",
    "SUMMARY",
    "VERIFIED",
    "Attempt",
    "RecordKey",
    "StepKey",
    "commit_key",
    "journal_key",
    "lease_key",
    "manifest_key",
    "new_nonce",
    "parse_record_key",
    "parse_reply_key",
    "parse_request_key",
    "parse_shard_key",
    "parse_step_key",
    "quarantine_key",
    "reply_key",
    "request_key",
    "shard_key",
    "shard_prefix",
    "verified_key",
]

COMMITS = "commits/"
MANIFESTS = "manifests/"
SHARDS = "shards/"
QUARANTINE = "quarantine/"
VERIFIED = "verified/"
JOURNAL = "journal/"
LEASES = "lease/"
CONTROL = "control/"
PROBES = "probe/"
EVENTS = "events.jsonl"
SUMMARY = "summary.json"
RUN = "run.json"

MAX_STEP = 10**10 - 1
"""The last step whose names can be taken apart again: ten digits."""

# ASCII digits only: \d would take other scripts' digits for ours.
_STEP_KEY = re.compile(
    r"step-(?P<step>[0-9]{10})\.a(?P<number>[0-9]{6})-(?P<nonce>[0-9a-f]{8})(?:\.w(?P<writer>[0-9a-f]{8}))?\.json\Z"
)
_SHARD_KEY = re.compile(
    r"shards/step-(?P<step>[0-9]{10})/a(?P<number>[0-9]{6})-(?P<nonce>[0-9a-f]{8})/rank-(?P<rank>[0-9]{5,12})\.shard\Z"
)
_CONTROL_KEY = re.compile(r"control/(?P<what>request|reply)-(?P<nonce>[0-9a-f]{8})\.json\Z")
_NONCE = re.compile(r"[0-9a-f]{8}\Z")


def new_nonce() -> str:
    """A fresh owner nonce: 8 hexadecimal digits from the operating system's random source."""
    return secrets.token_hex(4)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Attempt:
    """One life of one worker group: a rising number plus its owner's nonce. The number is the fencing token."""

    number: int
    nonce: str

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError(f"attempt number {self.number} is negative")
        if _NONCE.match(self.nonce) is None:
            raise ValueError(f"attempt nonce {self.nonce!r} is not 8 hexadecimal digits")

    @property
    def label(self) -> str:
        """The Attempt as it stands in object names, e.g. ``a000003-9f2c11d0``."""
        return f"a{self.number:06d}-{self.nonce}"

    @staticmethod
    def parse(label: str) -> Attempt:
        """The inverse of :attr:`label`; raises ValueError on anything else."""
        number, _, nonce = label.removeprefix("a").partition("-")
        if not label.startswith("a") or not number.isdigit():
            raise ValueError(f"{label!r} is not an attempt label")
        return Attempt(number=int(number), nonce=nonce)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StepKey:
    """One Checkpoint's identity: its step and the Attempt that wrote it. Sorts by step, numerically."""

    step: int
    attempt: Attempt

    @property
    def stem(self) -> str:
        """The identity as a file stem, e.g. ``step-0000000040.a000003-9f2c11d0``."""
        return f"step-{self.step:010d}.{self.attempt.label}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordKey:
    """What the name of a stored record says: its Checkpoint, and the writing process (None in the first format)."""

    step_key: StepKey
    writer: str | None


def commit_key(key: StepKey, writer: str | None = None) -> str:
    """Name of the Commit of ``key`` by the process with the nonce ``writer``; None: as the first format had it."""
    return f"{COMMITS}{_record_stem(key, writer)}.json"


def manifest_key(key: StepKey, writer: str | None = None) -> str:
    """Name of the Manifest of ``key`` by the process with the nonce ``writer``; None: as the first format had it."""
    return f"{MANIFESTS}{_record_stem(key, writer)}.json"


def _record_stem(key: StepKey, writer: str | None) -> str:
    return key.stem if writer is None else f"{key.stem}.w{writer}"


def quarantine_key(key: StepKey) -> str:
    """Name of the record that takes ``key`` out of use."""
    return f"{QUARANTINE}{key.stem}.json"


def verified_key(key: StepKey) -> str:
    """Name of the record that ``key`` was verified."""
    return f"{VERIFIED}{key.stem}.json"


def shard_prefix(key: StepKey) -> str:
    """Folder that holds every Shard object of ``key`` and nothing else."""
    return f"{SHARDS}step-{key.step:010d}/{key.attempt.label}/"


def shard_key(key: StepKey, rank: int) -> str:
    """Name of the Shard object that ``rank`` writes for ``key``."""
    return f"{shard_prefix(key)}rank-{rank:05d}.shard"


def journal_key(sequence: int, nonce: str) -> str:
    """Name of one Journal entry; ``nonce`` is its driver's, so two drivers never write one name."""
    return f"{JOURNAL}{sequence:08d}.{nonce}.json"


def lease_key(nonce: str) -> str:
    """Name of the Lease record of the driver with ``nonce``."""
    return f"{LEASES}{nonce}.json"


def request_key(nonce: str) -> str:
    """Name of what a person asks a driver for; ``nonce`` is the request's own."""
    return f"{CONTROL}request-{nonce}.json"


def reply_key(nonce: str) -> str:
    """Name of a driver's answer to the request with ``nonce``."""
    return f"{CONTROL}reply-{nonce}.json"


def parse_request_key(key: str) -> str | None:
    """The nonce in the name of a request, or None when the name is not exactly one of ours."""
    match = _CONTROL_KEY.match(key)
    return match["nonce"] if match is not None and match["what"] == "request" else None


def parse_reply_key(key: str) -> str | None:
    """The nonce in the name of a reply, or None when the name is not exactly one of ours."""
    match = _CONTROL_KEY.match(key)
    return match["nonce"] if match is not None and match["what"] == "reply" else None


def parse_step_key(name: str) -> StepKey | None:
    """Identity in a Commit, Manifest or quarantine name (any folder), or None when the name is not ours."""
    record = _parse_record_name(name.rpartition("/")[2])
    return None if record is None else record.step_key


def parse_record_key(key: str, folder: str) -> RecordKey | None:
    """What the whole key of a record directly in ``folder`` says, or None when it is not exactly one of our names."""
    return _parse_record_name(key.removeprefix(folder)) if key.startswith(folder) else None


def _parse_record_name(name: str) -> RecordKey | None:
    match = _STEP_KEY.match(name)
    if match is None:
        return None
    attempt = Attempt(number=int(match["number"]), nonce=match["nonce"])
    return RecordKey(step_key=StepKey(step=int(match["step"]), attempt=attempt), writer=match["writer"])


def parse_shard_key(key: str) -> tuple[StepKey, int] | None:
    """Identity and rank in the name of a Shard object, or None when the name is not exactly one of ours."""
    match = _SHARD_KEY.match(key)
    if match is None:
        return None
    attempt = Attempt(number=int(match["number"]), nonce=match["nonce"])
    step_key, rank = StepKey(step=int(match["step"]), attempt=attempt), int(match["rank"])
    # rank-000007 names no rank of ours: 7 is written rank-00007
    return (step_key, rank) if shard_key(step_key, rank) == key else None
