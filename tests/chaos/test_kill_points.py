"""SIGKILL at seeded points of save, upload, commit, prune and sweep: what was committed stays, and the next save works.

Real processes, real storage code, a real directory or a real S3 server. RAYSUME_KILL_SEED repeats a run; --slow does
hundreds of kills, otherwise a few.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import boto3
import pytest

from tests.chaos.kill_points import CATEGORIES, Life, open_url
from tests.chaos.killed_lives import LifeRecord, Nursery, Witness, debris
from tests.servers import MotoServer
from tests.servers.process import ServerProcess

Recorder = Callable[[str, object], None]

SEED = int(os.environ.get("RAYSUME_KILL_SEED", "20260917"))
KILLS_IN_A_ROW = 20
NUM_SERIES = 10
S3_KILLS_IN_A_ROW = 10
NUM_S3_SERIES = 2
SMALL_PART_SERVER = "import moto.s3.models; moto.s3.models.S3_UPLOAD_PART_MIN_SIZE = 1\n" + MotoServer.script


class Series:
    """Many lives in one store, whose debris adds up."""

    def __init__(self, nursery: Nursery, url: str, directory: Path, seed: int) -> None:
        self._nursery, self._url, self._directory = nursery, url, directory
        self._random = random.Random(seed)
        self._number = 0
        self._witness = Witness(open_url(url))
        self._usual: dict[str, int] = {}
        self.kills: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.in_the_middle = 0

    def run(self, kills: int) -> None:
        """Two quiet lives to learn how many calls one makes, then ``kills`` that are killed, then one to clean up."""
        for _ in range(2):
            self._usual = self._quiet_life().counts
        assert set(self._usual) >= set(CATEGORIES), self._usual
        kinds = sorted(self._usual)
        for turn in range(3 * kills):
            if self.kills.total() == kills:
                break
            self._killed_life(kinds[turn % len(kinds)])
        assert self.kills.total() == kills
        self._quiet_life()

    def _quiet_life(self) -> LifeRecord:
        life = replace(self._life(), sweep_orphans=True, use_keeper=True, use_spool=True)
        record = self._nursery.live(life)
        assert record.code == 0, f"{life}\n{self._nursery.errors()}"
        self._witness.hear(record)
        self._witness.check(str(life))
        return record

    def _killed_life(self, category: str) -> None:
        life = self._life()
        needs_spool = category.startswith("spool")
        life = replace(
            life,
            use_keeper=life.use_keeper or needs_spool,
            use_spool=life.use_spool or needs_spool,
            category=category,
            nth=self._random.randint(1, self._usual[category]),
            fraction=self._random.choice((0.0, self._random.random(), self._random.random(), 1.0)),
        )
        record = self._nursery.live(life)
        self._witness.hear(record)
        self._witness.check(f"{life} {record}")
        if record.killed is None:
            assert record.code == 0, f"{life}\n{self._nursery.errors()}"
            return  # it made fewer such calls than usual
        assert record.code == -signal.SIGKILL
        self.kills[record.killed["category"]] += 1
        self.calls[record.killed["call"]] += 1
        self.in_the_middle += 0 < record.killed["byte"] < record.killed["of"]
        self._number += 1
        self._witness.save_next(self._number, life.world_size, f"{life} {record}")

    def _life(self) -> Life:
        self._number += 1
        return Life(
            number=self._number,
            url=self._url,
            arena=str(self._directory / f"raysume-run-{self._number}"),
            saves=self._random.randint(2, 3),
            world_size=self._random.choice((2, 3, 4)),
            use_keeper=self._random.random() < 0.6,
            use_spool=self._random.random() < 0.6,
            sweep_orphans=self._random.random() < 0.3,
        )

    def report(self) -> str:
        kinds = ", ".join(f"{number} in {name}" for name, number in sorted(self.kills.items()))
        calls = ", ".join(f"{name} {number}" for name, number in sorted(self.calls.items()))
        return f"{self.kills.total()} kills: {kinds}; at {calls}; {self.in_the_middle} within the bytes of a write"


def child_env(directory: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(directory), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def series_of(number: int) -> list[object]:
    """The first one always, the others with --slow."""
    return [0, *(pytest.param(series, marks=pytest.mark.slow) for series in range(1, number))]


@pytest.mark.parametrize("series", series_of(NUM_SERIES))
def test_what_was_committed_outlives_a_kill_at_any_point(
    series: int, tmp_path: Path, record_property: Recorder
) -> None:
    root = tmp_path / "store"
    with Nursery(tmp_path, child_env(tmp_path)) as nursery:
        lives = Series(nursery, str(root), tmp_path, SEED + series)
        lives.run(KILLS_IN_A_ROW)
    said = f"RAYSUME_KILL_SEED={SEED} series {series}: {lives.report()}"
    record_property("seeded", said)
    left = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    assert not debris(open_url(str(root)), left), said
    assert not list(tmp_path.glob("raysume-run-*/buffer-*")), "shared memory of dead Keepers"
    assert not [path for path in (tmp_path / "spool").rglob("*") if path.is_file()], "spooled Shards of dead Keepers"


@pytest.fixture
def small_part_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    """moto, which takes parts of any size, and the usual AWS variables pointing at it."""
    server = ServerProcess("moto", [sys.executable, "-P", "-c", SMALL_PART_SERVER], tmp_path).start()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    yield server
    server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("series", range(NUM_S3_SERIES))
def test_the_same_on_s3_with_uploads_of_many_parts(
    series: int, small_part_server: ServerProcess, tmp_path: Path, record_property: Recorder
) -> None:
    s3 = boto3.client("s3", endpoint_url=small_part_server.endpoint)
    s3.create_bucket(Bucket="runs")
    url = "s3://runs/run"
    with Nursery(tmp_path, child_env(tmp_path)) as nursery:
        lives = Series(nursery, url, tmp_path, SEED + series)
        lives.run(S3_KILLS_IN_A_ROW)
    said = f"RAYSUME_KILL_SEED={SEED} S3 series {series}: {lives.report()}"
    record_property("seeded", said)
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket="runs", Prefix="run/")
    left = {entry["Key"].removeprefix("run/") for page in pages for entry in page.get("Contents", ())}
    assert left
    assert not debris(open_url(url), left), said
    assert not s3.list_multipart_uploads(Bucket="runs").get("Uploads"), said
