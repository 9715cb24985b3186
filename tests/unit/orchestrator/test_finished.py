"""Whether a Run is finished, asked of a store that does not answer."""

from __future__ import annotations

import io

import pytest

from orchestrator import finished
from orchestrator.config import RunConfig
from orchestrator.errors import StartOutage
from orchestrator.summary import summarize
from storage.errors import StoreRefused, StoreUnavailable
from storage.memory_store import MemoryStore
from tests.unit.orchestrator.test_report_text import run_log

CONFIG = RunConfig.model_validate(
    {
        "run": {"name": "mine", "url": "s3://b/a", "steps": 10},
        "model": {"config": {"model_type": "llama"}},
        "data": {"url": "/data", "sequence_length": 8, "global_batch": 4},
    }
)


def failing(monkeypatch: pytest.MonkeyPatch, error: StoreUnavailable) -> None:
    store = MemoryStore()

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(store, "list", fail)
    monkeypatch.setattr(finished, "open_store", lambda *_: store)


def test_a_store_that_is_away_is_waited_for_only_once_before_the_start_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, StoreUnavailable("list", "commits/", "no answer within 30 s"))
    with pytest.raises(StartOutage, match=r"s3://b/a: .*no answer within 30 s"):
        finished.finished_summary(CONFIG)


def test_a_store_that_refuses_is_left_to_the_checks_that_come_after(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, StoreRefused("list", "commits/", "access denied"))
    assert finished.finished_summary(CONFIG) is None


def test_a_run_that_stands_beyond_its_steps_is_said_to_need_more_than_those() -> None:
    shorter = CONFIG.model_copy(update={"run": CONFIG.run.model_copy(update={"steps": 5})})
    said = []
    for config in (CONFIG.model_copy(update={"run": CONFIG.run.model_copy(update={"steps": 6})}), shorter):
        to = io.StringIO()
        finished.show_finished(summarize(run_log()), config, to, json_output=False, asked=("run.yaml",))
        said.append(to.getvalue().splitlines()[0])
    assert said == [
        "Nothing to do: this run has finished step 6. Raise run.steps (now 6) to train on.",
        "Nothing to do: this run has finished step 6. Raise run.steps (now 5) beyond that to train on.",
    ]
