"""A preemption notice that memory does not cover brings one save at once, beside the last one.

Real: the command, a Ray cluster of two nodes, a drain notice through Ray and SIGKILL at its end, FSDP over gloo,
Keepers, a file system store. No save but these is due.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from orchestrator.exit_codes import ExitCode
from tests.runs import RunProcess, assert_all_commits_verify, assert_nothing_left, make_run

NEVER = 100_000
DRAIN_AT, NOTICE_S = 25, 20
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("memory", ["off", "on"])
def test_what_was_trained_until_a_notice_is_saved_at_once_where_memory_does_not_hand_over(
    tmp_path: Path, data_url: str, memory: str
) -> None:
    settings: dict[str, dict[str, Any]] = {
        "checkpoint": {"every_steps": NEVER, "memory": {"mode": memory}},
        "world": {"max_workers": 2, "max_wait_s": 300.0, "start_grace_s": 60.0},
        "policy": {"deadline": {"margin_s": 3.0}},
    }
    run = make_run(tmp_path, data_url, steps=NEVER, every_steps=NEVER, settings=settings)
    with RunProcess.of_cli(run, "--local-nodes", "2", "--chaos", f"drain-node@{DRAIN_AT}:{NOTICE_S}s") as process:
        killed = process.wait_for("chaos", 200.0, lambda event: event["verb"] == "drain-deadline")
        process.wait_for("step", 100.0, lambda event: event["t_s"] > killed["t_s"] and event["world_size"] == 1)
        os.kill(process.pid, signal.SIGINT)
        result = process.finish(120.0)
    assert result.exit_code == ExitCode.STOPPED, result.stderr
    first = [event for event in result.named("save_bound") if event["attempt"] == 1]
    reasons = [event["reason"].partition(",")[0] for event in first]
    if memory == "on":
        assert "deadline: preemption notice" not in reasons, "it parts at once"
    else:
        assert reasons[0] == "deadline: preemption notice"
        assert [event["kind"] for event in first] == ["snapshot", "leave"]
        committed = [event["step"] for event in result.named("committed") if event["attempt"] == 1]
        assert committed == [event["step"] for event in first]
    moved = next(event for event in result.named("attempt_started") if event["cause"] == "preemption")
    assert moved["lost_steps"] == 0
    assert_all_commits_verify(run)
    assert_nothing_left(result)
