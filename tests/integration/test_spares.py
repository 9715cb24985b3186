"""A lost member is replaced by a worker that was kept warm for it, and another one is kept warm from then on.

Real: the command with its supervisor, three Ray nodes, SIGKILL of a worker, FSDP over gloo, a file system store.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.runs import (
    RunProcess,
    assert_each_attempt_goes_on_where_it_restored,
    assert_nothing_left,
    assert_samples_in_order,
    attempts_of,
    make_run,
    write_rows,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_world_keeps_its_size_when_a_member_dies(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    write_rows(data)
    world = {"min_workers": 1, "max_workers": 2, "spares": 1, "accept_joins": False, "start_grace_s": 60.0}
    run = make_run(tmp_path, data, steps=100_000, every_steps=20, settings={"world": world})
    with RunProcess.of_cli(run, "--local-nodes", "3") as process:
        members = process.wait_for("attempt_started", 120.0)["members"]
        spare = process.wait_for("worker_ready", 90.0, lambda event: event["worker"] not in members)["worker"]
        lost = process.wait_for("worker_ready", 1.0, lambda event: event["worker"] == members[0])
        process.wait_for("committed", 60.0)
        os.kill(lost["pid"], signal.SIGKILL)
        second = process.wait_for("attempt_started", 60.0, lambda event: event["attempt"] == 2)
        known = {*members, spare}
        process.wait_for("step", 60.0, lambda event: event["attempt"] == 2)
        process.wait_for("worker_ready", 90.0, lambda event: event["worker"] not in known)
        os.kill(process.pid, signal.SIGTERM)
        result = process.finish(90.0)
    assert second["members"] == [members[1], spare]
    assert attempts_of(result) == [("start", 2), ("worker-lost", 2)], "the new spare changes nothing"
    assert_each_attempt_goes_on_where_it_restored(result)
    assert_samples_in_order(result)
    assert_nothing_left(result)
