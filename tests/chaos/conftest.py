"""What the chaos tests share: one dataset, and one run that nothing happens to, for the others to be held against."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import GLOBAL_BATCH, NUM_ROWS, RunProcess, RunResult, make_run, write_rows

STEPS = NUM_ROWS // GLOBAL_BATCH  # one epoch: every row is consumed exactly once


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What seeded tests did, and the seed that repeats it, also where they passed."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "seeded":
                terminalreporter.write_line(str(value))


@pytest.fixture(scope="session")
def data_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("rows"))
    write_rows(url)
    return url


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, data_url: str) -> RunResult:
    """All steps on one worker, with no fault."""
    folder: Path = tmp_path_factory.mktemp("uninterrupted")
    run = make_run(folder, data_url, steps=STEPS, every_steps=100)
    with RunProcess.of_cli(run, "--local-nodes", "1", "world.max_workers=1") as process:
        return process.finish(180.0)
