"""Who a Run is: its id, made from name and root URL, and the record of when it first started. Same for every driver."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import xxhash
from pydantic import JsonValue

from orchestrator.config import RunConfig
from storage.errors import ObjectMissing
from storage.keys import RUN
from storage.object_store import ObjectStore

__all__ = ["RunIdentity", "build_digest", "installed_version", "make_run_id", "metadata_of", "open_run_record"]

_PACKAGES = ("orchestrator", "workers", "storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """``start_unix_s``: when the Run's first driver started; all event times count from it."""

    run_id: str
    start_unix_s: float
    is_new: bool


def make_run_id(name: str, root_url: str) -> str:
    """Name plus a digest of the root URL: two drivers given the same config agree on it without asking anyone."""
    return f"{name}-{xxhash.xxh3_64_hexdigest(root_url.rstrip('/').encode())[:8]}"


def open_run_record(store: ObjectStore, run_id: str) -> RunIdentity:
    """Read run.json, or write it when this is the Run's first driver."""
    try:
        record = json.loads(store.get(RUN))
        return RunIdentity(run_id=run_id, start_unix_s=float(record["start_unix_s"]), is_new=False)
    except ObjectMissing:
        start = time.time()
        body = {"run_id": run_id, "start_unix_s": start, "raysume": installed_version("raysume")}
        store.put(RUN, json.dumps(body, indent=1).encode())
        return RunIdentity(run_id=run_id, start_unix_s=start, is_new=True)


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
