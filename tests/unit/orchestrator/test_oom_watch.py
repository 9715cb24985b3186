"""The watch over the kernel's OOM kills. The count and the clock are given; one test has the kernel really kill."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.oom_watch import OomWatch, count_oom_kills

MEMORY_CGROUPS = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 64 << 20


def test_a_kill_is_recent_for_a_while_and_then_no_more() -> None:
    kills, now_s = [3], [100.0]
    watch = OomWatch(lambda: kills[0], lambda: now_s[0], is_watching=False)
    assert not watch.was_recent(10.0), "kills before the watch began are none of its business"
    kills[0] = 4
    assert watch.was_recent(10.0)
    now_s[0] += 9.0
    assert watch.was_recent(10.0)
    now_s[0] += 2.0
    assert not watch.was_recent(10.0)


def test_a_kernel_that_counts_nothing_says_nothing() -> None:
    watch = OomWatch(lambda: None, lambda: 0.0)
    assert not watch.was_recent(10.0)


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    directory = MEMORY_CGROUPS / f"raysume-test-{os.getpid()}"
    try:
        directory.mkdir()
        (directory / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError:
        pytest.skip("no memory cgroup can be made here")
    yield directory
    deadline = time.monotonic() + 10.0
    while True:
        try:
            directory.rmdir()
            return
        except OSError:  # the killed process is still on its way out
            assert time.monotonic() < deadline


def test_a_process_that_the_kernel_really_kills_is_noticed(small_cgroup: Path) -> None:
    script = (
        f"import os, time; open('{small_cgroup}/cgroup.procs', 'w').write(str(os.getpid()))\n"
        "from orchestrator.oom_watch import OomWatch; import subprocess, sys\n"
        "watch = OomWatch(is_watching=False)\n"
        "done = subprocess.run([sys.executable, '-c', 'x = bytearray(512 << 20)'])\n"
        "print(done.returncode, watch.was_recent(60.0))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["-9", "True"], done.stderr


def test_this_machine_has_a_count() -> None:
    assert (count_oom_kills() or 0) >= 0
