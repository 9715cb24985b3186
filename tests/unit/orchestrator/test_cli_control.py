"""`raysume scale`, `save` and `stop` on a real place, with a driver's Lease and desk as threads of this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.driver_lease import DriverLease
from orchestrator.requests import ReplyState, RequestDesk
from storage.keys import CONTROL, RUN
from storage.lease import acquire
from storage.open_store import open_store

runner = CliRunner()


@contextmanager
def driver(root: Path, state: ReplyState, reason: str = "", step: int | None = None) -> Iterator[list[str]]:
    """Lives, and answers everything with ``state``; yields what it was asked."""
    store = open_store(str(root))
    store.put(RUN, b"{}")
    lease = acquire(store, "r", nonce="aaaaaaaa")
    desk = RequestDesk(store, lease.nonce, interval_s=0.02)
    asked: list[str] = []
    closed = threading.Event()

    def work() -> None:
        while not closed.wait(0.01):
            for request in desk.take():
                asked.append(f"{request.wish} {request.workers}")
                desk.answer(request.nonce, state, reason, step)

    thread = threading.Thread(target=work, daemon=True)
    with DriverLease(lease, 1.0):
        desk.start()
        thread.start()
        try:
            yield asked
        finally:
            closed.set()
            thread.join(10.0)
            desk.close()


def test_a_scale_that_is_accepted_says_so(tmp_path: Path) -> None:
    with driver(tmp_path, "accepted", "3 workers are wanted, 2 train") as asked:
        done = runner.invoke(app, ["scale", str(tmp_path), "--workers", "3"])
    assert done.exit_code == 0, done.output
    assert asked == ["scale 3"]
    assert done.stdout == "accepted: 3 workers are wanted, 2 train\n"


def test_a_save_that_is_waited_for_names_its_step(tmp_path: Path) -> None:
    with driver(tmp_path, "done", "step 41 is committed", 41) as asked:
        done = runner.invoke(app, ["save", str(tmp_path), "--wait", "--json"])
    assert done.exit_code == 0, done.output
    assert asked == ["save None"]
    said = json.loads(done.stdout)
    assert (said["state"], said["step"], said["exit_code"], said["driver"]) == ("done", 41, 0, "aaaaaaaa")
    assert open_store(str(tmp_path)).list(CONTROL) == []


def test_a_refusal_has_its_reason_and_its_code(tmp_path: Path) -> None:
    with driver(tmp_path, "refused", "1 workers are fewer than world.min_workers (2)"):
        plain = runner.invoke(app, ["scale", str(tmp_path), "--workers", "1"])
        said = runner.invoke(app, ["scale", str(tmp_path), "--workers", "1", "--json"])
    assert plain.exit_code == said.exit_code == 23
    assert "error: the driver refused: 1 workers are fewer than world.min_workers (2)" in plain.stderr
    assert json.loads(said.stdout)["state"] == "refused"


def test_what_is_not_done_in_time_has_a_code_of_its_own(tmp_path: Path) -> None:
    with driver(tmp_path, "accepted", "no step is made now"):
        done = runner.invoke(app, ["save", str(tmp_path), "--wait", "--timeout", "1"])
    assert done.exit_code == 24
    assert "going on (--timeout): accepted: no step is made now" in done.stderr


def test_no_driver_no_run_and_no_such_url_are_told_apart(tmp_path: Path) -> None:
    nothing = runner.invoke(app, ["save", str(tmp_path / "no")])
    assert nothing.exit_code == 20
    assert "holds nothing of a run" in nothing.stderr
    assert not (tmp_path / "no").exists()
    open_store(str(tmp_path)).put(RUN, b"{}")
    alone = runner.invoke(app, ["scale", str(tmp_path), "--workers", "2", "--json"])
    assert alone.exit_code == 22
    assert "world.max_workers=2" in json.loads(alone.stdout)["error"]
    assert runner.invoke(app, ["stop", "s3:/bucket/run"]).exit_code == 10


def test_a_run_may_be_named_by_its_configuration(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        json.dumps(
            {
                "run": {"name": "r", "url": str(tmp_path / "run"), "steps": 9},
                "model": {"config": {"model_type": "llama"}},
                "data": {"url": "d", "sequence_length": 8, "global_batch": 8},
            }
        )
    )
    with driver(tmp_path / "run", "accepted", "saving the newest step, then stopping") as asked:
        done = runner.invoke(app, ["stop", str(path)])
    assert done.exit_code == 0, done.output
    assert asked == ["stop None"]
    missing = runner.invoke(app, ["stop", str(tmp_path / "rum.yaml")])
    assert missing.exit_code == 10
    assert "did you mean" in missing.stderr


@pytest.mark.parametrize("command", ["scale", "save", "stop"])
def test_the_help_shows_examples_and_codes(command: str) -> None:
    shown = runner.invoke(app, [command, "--help"])
    assert shown.exit_code == 0
    assert f"raysume {command} " in shown.stdout
    assert "22 no driver is" in shown.stdout
