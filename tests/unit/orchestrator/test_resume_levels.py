"""The wish for an L1-only resume: only with an explicit step, and it reaches the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config import RunConfig
from orchestrator.errors import ConfigError
from orchestrator.load_config import load_config
from orchestrator.resume import Resume, parse_resume
from storage.commit_log import CommitLog
from storage.open_store import open_store
from storage.restore import plan_restore
from tests.fakes.checkpoints import RUN, attempt, save

LOCAL = Path(__file__).resolve().parents[3] / "clusters" / "local" / "run.yaml"


def config(url: Path, *changes: str) -> RunConfig:
    return load_config(LOCAL, [f"run.url={url}", *changes])


def parse(url: Path, *changes: str) -> Resume:
    return parse_resume(config(url, *changes), CommitLog(open_store(str(url)), RUN))


def test_a_step_and_l1_give_a_plan_of_that_level_alone(tmp_path: Path) -> None:
    save(open_store(str(tmp_path)), 10)
    resume = parse(tmp_path, "run.resume=10", "run.resume_levels=L1")
    plan = plan_restore(CommitLog(open_store(str(tmp_path)), RUN), attempt=attempt(2), step=resume.step)
    assert plan is not None
    assert plan.levels is None
    assert resume.narrowed(plan).levels == ("L1",)


def test_without_the_wish_the_plan_stays_whole(tmp_path: Path) -> None:
    save(open_store(str(tmp_path)), 10)
    resume = parse(tmp_path, "run.resume=10")
    plan = plan_restore(CommitLog(open_store(str(tmp_path)), RUN), attempt=attempt(2), step=resume.step)
    assert plan is not None
    assert resume.narrowed(plan) == plan


@pytest.mark.parametrize("wish", ["auto", "none", "s3://bucket/other"])
def test_without_a_step_it_is_refused_since_each_restart_would_drop_the_moments(tmp_path: Path, wish: str) -> None:
    with pytest.raises(ConfigError, match="to be the step to go on from"):
        parse(tmp_path, f"run.resume={wish}", "run.resume_levels=L1")
