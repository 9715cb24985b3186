"""Who a Run is: its id, and the record of when it first started. Same for every driver.

The id is made once, from name and root URL. From then on it is what the Run's own records say, wherever they lie.
"""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import xxhash
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from orchestrator.config import RunConfig
from orchestrator.errors import ConfigError, cannot_start
from storage.commit_log import CommitLog
from storage.errors import ObjectMissing, StorageError
from storage.keys import EVENTS, RUN
from storage.object_store import ObjectStore

__all__ = [
    "RunIdentity",
    "build_digest",
    "find_run_id",
    "installed_version",
    "make_run_id",
    "metadata_of",
    "open_run_record",
]

_PACKAGES = ("orchestrator", "workers", "storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """``start_unix_s``: when the Run's first driver started; all event times count from it."""

    run_id: str
    start_unix_s: float
    is_new: bool


class _RunRecord(BaseModel):
    """run.json. Whatever else a later version puts into it is passed over."""

    model_config = ConfigDict(frozen=True)

    run_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    start_unix_s: float
    raysume: str = ""


def make_run_id(name: str, root_url: str) -> str:
    """The id of a Run that begins here: two drivers given the same config agree on it without asking anyone."""
    return f"{name}-{xxhash.xxh3_64_hexdigest(root_url.rstrip('/').encode())[:8]}"


def find_run_id(store: ObjectStore, config: RunConfig) -> str:
    """The id of the Run at run.url: as run.json says, else as its Commits carry it, else one for a Run that begins.

    So a Run that was moved, copied, or is reached by another spelling of its URL still knows its own Checkpoints.
    Writes nothing. Raises ConfigError (StartOutage) where the store does not answer or run.json cannot be read.
    """
    try:
        record = _read_record(store)
        if record is not None:
            return record.run_id
        commits = CommitLog(store, None).all_commits()
    except StorageError as error:
        raise cannot_start(config.run.url, f"run.url cannot be reached: {error}", error) from error
    if commits:
        return max(commits, key=lambda commit: (commit.attempt.number, commit.step)).run_id
    return make_run_id(config.run.name, config.run.url)


def open_run_record(store: ObjectStore, run_id: str) -> RunIdentity:
    """Read run.json, or write it when this is the Run's first driver or the record was lost."""
    record = _read_record(store)
    if record is not None:
        if record.run_id != run_id:
            text = (
                f"{RUN} says that this is run {record.run_id}, this driver took it for {run_id}: "
                "another one began the run at the same moment; start this one again"
            )
            raise ConfigError(store.url, (text,))
        return RunIdentity(run_id=run_id, start_unix_s=record.start_unix_s, is_new=False)
    is_new = not CommitLog(store, run_id).all_commits()
    told = None if is_new else _start_in_events(store)
    record = _RunRecord(
        run_id=run_id, start_unix_s=time.time() if told is None else told, raysume=installed_version("raysume")
    )
    store.put(RUN, record.model_dump_json(indent=1).encode())
    return RunIdentity(run_id=run_id, start_unix_s=record.start_unix_s, is_new=is_new)


def _read_record(store: ObjectStore) -> _RunRecord | None:
    try:
        return _RunRecord.model_validate_json(store.get(RUN))
    except ObjectMissing:
        return None
    except ValidationError as error:
        text = f"{RUN} there cannot be read; without it the Commits say which run this is, so remove it: {error}"
        raise ConfigError(store.url, (text,)) from error


def _start_in_events(store: ObjectStore) -> float | None:
    """The start that the last driver counted from, so that the times of all events stay of one kind."""
    try:
        lines = store.get(EVENTS).splitlines()
    except ObjectMissing:
        return None
    for line in reversed(lines):
        try:
            event = json.loads(line) if b"run_started" in line else None
        except ValueError:  # torn by a crash; an earlier driver said the same
            continue
        if isinstance(event, dict) and event.get("event") == "run_started":
            start = event.get("start_unix_s")
            return float(start) if isinstance(start, int | float) else None
    return None


def installed_version(package: str) -> str:
    """Of an installed package; this project itself may also have come along as a job's working directory."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def build_digest() -> str:
    """xxh3_64 over the source of the three packages: a Keeper that runs other code is replaced."""
    digest = xxhash.xxh3_64()
    root = Path(__file__).resolve().parent.parent
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def metadata_of(config: RunConfig) -> dict[str, JsonValue]:
    """What every Manifest says about where it came from: run config, git commit if there is one, versions."""
    return {
        "config": config.model_dump(mode="json"),
        "git_commit": _git_commit(),
        "versions": {name: installed_version(name) for name in ("raysume", "ray", "torch", "transformers")},
    }


def _git_commit() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
