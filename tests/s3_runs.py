"""Whole Runs for tests: real driver processes on a real cluster, their configuration, their events and their store.

A driver is the command line in its own process group, killed like a machine would. Waiting means following the event
file. Nothing here asserts what a Run should do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import boto3
import pytest
import yaml

from orchestrator.run_identity import make_run_id
from storage.events import read_events
from tests.clusters import RayNodes, ray_nodes
from tests.fakes.token_datasets import write_numbered_rows
from tests.servers import SwiftServer
from workers.sample_order import chain, leaf_digest, sample_ids
from workers.state import EMPTY_CHAIN

__all__ = ["Driver", "Event", "RunSetup", "StoredObject", "expected_chains", "listing", "make_dataset", "run_cluster"]

NUM_ROWS = 256
SEQUENCE_LENGTH = 16
POLL_S = 0.05
START_S = 90.0  # bound on anything that begins with processes that import torch

Event = dict[str, Any]
T = TypeVar("T")


@contextmanager
def run_cluster(swift: SwiftServer) -> Iterator[RayNodes]:
    """One node that takes three workers. Its processes, Keepers too, reach Swift by the usual AWS variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_ACCESS_KEY_ID", swift.access_key)
        patch.setenv("AWS_SECRET_ACCESS_KEY", swift.secret_key)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", swift.endpoint)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with ray_nodes(1, cpus_per_node=3) as nodes:
            yield nodes


def make_dataset(directory: Path) -> str:
    """Rows that name themselves, so that a digest of samples can be recomputed from the seed."""
    url = str(directory / "dataset")
    write_numbered_rows(url, NUM_ROWS, sequence_length=SEQUENCE_LENGTH, row_group_rows=16)
    return url


@dataclass(frozen=True, slots=True)
class StoredObject:
    size: int
    etag: str


def listing(bucket: str, swift: SwiftServer) -> dict[str, StoredObject]:
    """Every object of the bucket, as the server lists it."""
    client = boto3.client("s3", endpoint_url=swift.endpoint)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    return {
        entry["Key"]: StoredObject(size=entry["Size"], etag=entry["ETag"])
        for page in pages
        for entry in page.get("Contents", ())
    }


@dataclass(kw_only=True)
class RunSetup:
    """One Run: its configuration as plain data, changed freely between drivers."""

    name: str
    url: str
    directory: Path
    address: str
    dataset: str
    steps: int
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.config = {
            "run": {"name": self.name, "url": self.url, "steps": self.steps},
            "seed": 3,
            "world": {"min_workers": 1, "max_workers": 1, "start_grace_s": 0, "accept_joins": False},
            "model": {
                "config": {
                    "model_type": "llama",
                    "vocab_size": NUM_ROWS,
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 4,
                    "max_position_embeddings": 32,
                }
            },
            "data": {
                "url": self.dataset,
                "sequence_length": SEQUENCE_LENGTH,
                "global_batch": 8,
                "micro_batch": 1,
                "validation_fraction": 0,
            },
            # Without the memory Tier, whose Snapshots would be gone on from: here it is the store that is looked at.
            "checkpoint": {"every_steps": 5, "keep": 100, "memory": {"mode": "off"}},
        } | self.config

    @property
    def run_id(self) -> str:
        return make_run_id(self.name, self.url)

    @property
    def events_path(self) -> Path:
        return self.directory / "events.jsonl"

    def events(self, name: str | None = None) -> list[Event]:
        """All events so far, of every driver of the Run."""
        found = read_events(self.events_path) if self.events_path.exists() else []
        return [event for event in found if name is None or event["event"] == name]

    @contextmanager
    def driver(
        self,
        *overrides: str,
        address: str | None = None,
        events_path: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Iterator[Driver]:
        """One more driver; killed on the way out if it still runs."""
        driver = Driver(self, overrides, address or self.address, events_path or self.events_path, env or {})
        try:
            yield driver
        finally:
            driver.close()

    def drive(self, *overrides: str, timeout_s: float = START_S, env: Mapping[str, str] | None = None) -> Driver:
        """A driver from start to end."""
        with self.driver(*overrides, env=env) as driver:
            driver.wait(timeout_s)
        return driver


class Driver:
    """`python -m orchestrator run` of one Run."""

    def __init__(
        self, run: RunSetup, overrides: tuple[str, ...], address: str, events_path: Path, env: Mapping[str, str]
    ) -> None:
        self._run = run
        self._events_path = events_path
        config = run.directory / "run.yaml"
        config.write_text(yaml.safe_dump(run.config))
        self._output = run.directory / f"driver-{time.monotonic_ns()}.txt"
        self._seen = len(run.events()) if events_path == run.events_path else 0
        options = ["--ray-address", address, "--events-file", str(events_path)]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator", "run", str(config), *overrides, *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def events(self, name: str | None = None) -> list[Event]:
        """What was written since this driver was started."""
        found = read_events(self._events_path)[self._seen :] if self._events_path.exists() else []
        return [event for event in found if name is None or event["event"] == name]

    def wait_event(
        self, name: str, is_it: Callable[[Event], bool] = lambda _: True, timeout_s: float = START_S
    ) -> Event:
        """The first event of that name that fits; fails when the driver ends before it."""

        def find() -> Event | None:
            return next((event for event in self.events(name) if is_it(event)), None)

        return self.wait_for(find, f"a {name} event", timeout_s)

    def wait_for(self, find: Callable[[], T | None], what: str, timeout_s: float = START_S) -> T:
        """What ``find`` finds; fails when the driver ends before it, or after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while True:
            is_over = self.code is not None
            found = find()
            if found is not None:
                return found
            assert not is_over, f"the driver ended with {self.code} before {what}:\n{self.output[-6000:]}"
            assert time.monotonic() < deadline, f"no sign of {what} in {timeout_s} s:\n{self.output[-6000:]}"
            time.sleep(POLL_S)

    def wait(self, timeout_s: float = START_S) -> int:
        """The exit code."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the driver did not end in {timeout_s} s:\n{self.output[-6000:]}") from None

    def kill(self) -> None:
        """SIGKILL, and reaped."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(10.0)

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()


def expected_chains(run: RunSetup) -> list[str]:
    """The sample chain after each step, from step 0 on, made from seed and batch alone."""
    data = run.config["data"]
    size, leaf = data["global_batch"], data["micro_batch"]
    chains = [EMPTY_CHAIN]
    for number in range(run.steps):
        ids = sample_ids(run.config["seed"], NUM_ROWS, number * size, size)
        digests = [leaf_digest(ids[start : start + leaf]) for start in range(0, size, leaf)]
        chains.append(chain(chains[-1], digests))
    return chains
