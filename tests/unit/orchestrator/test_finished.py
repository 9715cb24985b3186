"""Whether a Run is finished, asked of a store that does not answer."""

from __future__ import annotations

import pytest

from orchestrator import finished
from orchestrator.config import RunConfig
from orchestrator.errors import StartOutage
from storage.errors import StoreRefused, StoreUnavailable
from storage.memory_store import MemoryStore

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
