"""What `run.resume` may mean, over real Checkpoints in a local store. No Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import RunConfig
from orchestrator.errors import ConfigError
from orchestrator.resume import Resume, parse_resume
from storage.commit_log import CommitLog
from storage.errors import StoreUnavailable
from storage.open_store import open_store
from tests.fakes.checkpoints import RUN, save


def config(url: Path, resume: str) -> RunConfig:
    tree: dict[str, Any] = {
        "run": {"name": "r", "url": str(url), "steps": 9, "resume": resume},
        "model": {"config": {"model_type": "llama"}},
        "data": {"url": "unused", "sequence_length": 16, "global_batch": 8},
    }
    return RunConfig.model_validate(tree)


def parse(url: Path, resume: str) -> Resume:
    return parse_resume(config(url, resume), CommitLog(open_store(str(url)), RUN))


@pytest.fixture
def used(tmp_path: Path) -> Path:
    for step in (9, 10, 100):
        save(open_store(str(tmp_path / "used")), step)
    return tmp_path / "used"


def test_auto_means_the_newest_commit_or_a_fresh_start(used: Path, tmp_path: Path) -> None:
    assert parse(used, "auto") == parse(tmp_path / "new", "auto") == Resume()


def test_none_is_for_a_place_without_checkpoints(used: Path, tmp_path: Path) -> None:
    assert parse(tmp_path / "new", "none") == Resume()
    with pytest.raises(ConfigError, match="up to step 100"):
        parse(used, "none")


def test_a_step_must_exist(used: Path) -> None:
    assert parse(used, "10") == Resume(step=10)
    with pytest.raises(ConfigError, match=r"no usable Checkpoint of step 11 \(usable steps: 9, 10, 100\)"):
        parse(used, "11")


def test_another_url_must_hold_a_checkpoint_and_gives_way_to_the_runs_own(used: Path, tmp_path: Path) -> None:
    assert parse(tmp_path / "new", str(used)) == Resume(url=str(used))
    assert parse(used, str(tmp_path / "anything")) == Resume()
    with pytest.raises(ConfigError, match=f"{tmp_path / 'typo'}: no usable Checkpoint there"):
        parse(tmp_path / "new", str(tmp_path / "typo"))
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize("resume", ["none", "10", "url"])
def test_a_store_that_cannot_be_asked_is_not_empty(
    resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: CommitLog) -> None:
        raise StoreUnavailable("list", "commits/", "no answer")

    monkeypatch.setattr(CommitLog, "commits", fail)
    with pytest.raises(ConfigError, match="no answer"):
        parse(tmp_path / "new", resume)
