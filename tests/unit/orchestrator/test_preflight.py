"""The checks before the first worker, on a store in memory."""

from __future__ import annotations

import logging

import pytest

from orchestrator.config import RunConfig
from orchestrator.errors import ConfigError
from orchestrator.preflight import check_before_start
from storage.errors import StoreUnavailable
from storage.memory_store import MemoryStore


def config_at(url: str) -> RunConfig:
    tree = {
        "run": {"name": "mine", "url": url, "steps": 10},
        "model": {"config": {"model_type": "llama"}},
        "data": {"url": "/data", "sequence_length": 8, "global_batch": 4},
    }
    return RunConfig.model_validate(tree)


def test_the_probe_leaves_nothing_behind() -> None:
    store = MemoryStore()
    assert check_before_start(store, config_at("memory://a"), "n0").honours_create
    assert list(store.list("")) == []


def test_a_store_that_does_not_answer_is_a_config_error_with_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()

    def put(key: str, *_: object, **__: object) -> None:
        raise StoreUnavailable("put", key, "access denied")

    monkeypatch.setattr(store, "put", put)
    with pytest.raises(ConfigError, match=r"access denied.*check run\.url"):
        check_before_start(store, config_at("s3://b/a"), "n0")


@pytest.mark.parametrize(
    ("url", "is_warned"),
    [
        ("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1/outputs/a", True),
        ("/shared/outputs/a", False),
    ],
)
def test_a_place_inside_a_jobs_temporary_directory_is_warned_of(
    url: str, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_before_start(MemoryStore(), config_at(url), "n0")
    assert ("temporary copy of the job's working directory" in caplog.text) is is_warned
