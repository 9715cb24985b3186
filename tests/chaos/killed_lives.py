"""The parent's side of the kill tests: asks a nursery for lives, and holds a store to what was acknowledged in them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from storage.commit_log import CommitLog
from storage.config import CheckpointConfig
from storage.direct import DirectKeeper
from storage.frames import read_index, read_rows
from storage.keys import COMMITS, MANIFESTS, SHARDS, parse_shard_key, parse_step_key
from storage.manifest import Commit
from storage.object_store import ObjectStore
from storage.verify import verify_commit
from tests.chaos.kill_points import Life, attempt_of, order_for
from tests.fakes.recording_sink import RecordingSink
from tests.fakes.saving import RUN, committer_for, save_all_ranks, values

__all__ = ["LifeRecord", "Nursery", "Witness", "check_values", "debris"]

LIFE_S = 60.0


@dataclass(kw_only=True)
class LifeRecord:
    """What one life said, and how it ended."""

    committed: list[int] = field(default_factory=list)
    uncommitting: list[int] = field(default_factory=list)
    killed: dict[str, Any] | None = None
    counts: dict[str, int] = field(default_factory=dict)
    code: int = 0


class Nursery:
    """A process that forks one life after the other."""

    def __init__(self, directory: Path, env: dict[str, str]) -> None:
        self._log = directory / "nursery.log"
        self._heard = b""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.kill_points"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                cwd=Path(__file__).parents[2],
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def live(self, life: Life) -> LifeRecord:
        """One life from birth to its end."""
        assert self._process.stdin is not None
        self._process.stdin.write(order_for(life))
        self._process.stdin.flush()
        record = LifeRecord()
        until = time.monotonic() + LIFE_S
        while True:
            words = self._line(life, until)
            if "ended" in words:
                record.code = words["ended"]
                return record
            record.committed += [words["committed"]] if "committed" in words else []
            record.uncommitting += [words["uncommitting"]] if "uncommitting" in words else []
            record.killed = words.get("killed", record.killed)
            record.counts = words.get("counts", record.counts)

    def _line(self, life: Life, until: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        while b"\n" not in self._heard:
            readable, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))
            got = os.read(self._process.stdout.fileno(), 1 << 16) if readable else b""
            if not got:
                raise AssertionError(f"no word of {life} within {LIFE_S} s; errors:\n{self.errors()}")
            self._heard += got
        line, _, self._heard = self._heard.partition(b"\n")
        words: dict[str, Any] = json.loads(line)
        return words

    def errors(self) -> str:
        """The end of what was logged."""
        return self._log.read_text(errors="replace")[-4000:]


class Witness:
    """Knows what was acknowledged in one store, and checks that it is all there and good."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._committed: set[int] = set()
        self._gone: set[int] = set()

    def hear(self, record: LifeRecord) -> None:
        self._committed.update(record.committed)
        self._gone.update(record.uncommitting)

    def check(self, where: str) -> list[Commit]:
        """Every Commit there is verifies and holds what was saved; none that was acknowledged is missing."""
        log = CommitLog(self.store, RUN)
        scan = log.scan()
        assert not scan.unreadable, where
        assert not log.quarantined_keys(), where
        commits = log.commits()
        missing = self._committed - self._gone - {commit.step for commit in commits}
        assert not missing, f"{where}: committed steps {sorted(missing)} are gone"
        for commit in scan.commits:
            report = verify_commit(self.store, log, commit)
            assert report.is_good, f"{where}: step {commit.step}: {[*map(str, report.problems)]}"
        if commits:
            check_values(self.store, log, commits[-1])
        return commits

    def save_next(self, number: int, world_size: int, where: str) -> None:
        """The save after a death: a new Attempt continues and its Commit verifies."""
        commits = CommitLog(self.store, RUN).commits()
        base_step = commits[-1].step if commits else 0
        sink = RecordingSink()
        committer = committer_for(self.store, orphan_grace_s=3600.0)
        with DirectKeeper(self.store, sink, CheckpointConfig()) as keeper:
            save_all_ranks(
                committer,
                keeper,
                sink,
                attempt=attempt_of(number),
                step=base_step + 1,
                base_step=base_step,
                world_size=world_size,
            )
        self._committed.add(base_step + 1)
        newest = self.check(f"{where}, then a save")[-1]
        assert newest.step == base_step + 1, where


def check_values(store: ObjectStore, log: CommitLog, commit: Commit) -> None:
    """Every tensor's bytes, read as a loading rank does, are those that were saved."""
    manifest = log.read_manifest(commit)
    for record in manifest.shards:

        def fetch(offset: int, length: int, key: str = record.key) -> bytes:
            return store.get_range(key, offset, length)

        saved = values(commit.step, record.rank)
        for chunk in read_index(fetch, record, step=commit.step).chunks:
            raw = read_rows(chunk, 0, chunk.sizes[0], fetch, step=commit.step, key=record.key)
            assert np.array_equal(np.frombuffer(raw, np.float32), saved.pop(chunk.name).reshape(-1)), chunk.name
        assert not saved


def debris(store: ObjectStore, names: set[str]) -> set[str]:
    """Of the names of all that lies in a store's folders, those that belong to no Commit."""
    committed = {commit.step_key for commit in CommitLog(store, RUN).commits()}

    def is_left_over(name: str) -> bool:
        shard = parse_shard_key(name)
        step_key = shard[0] if shard else parse_step_key(name)
        return step_key not in committed

    return {name for name in names if name.startswith((COMMITS, MANIFESTS, SHARDS)) and is_left_over(name)}
