"""Who a Run is, on machines where this project is installed and where it only came along as a working directory."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from orchestrator import run_identity
from orchestrator.config import RunConfig
from orchestrator.driver_record import events_path_of
from orchestrator.errors import ConfigError
from orchestrator.run_identity import find_run_id, make_run_id, metadata_of, open_run_record
from storage.commit_log import CommitLog
from storage.errors import StoreRefused
from storage.events import EventLog
from storage.keys import EVENTS, RUN
from storage.memory_store import MemoryStore
from storage.object_store import ObjectStore
from storage.open_store import open_store
from tests.fakes.checkpoints import RUN as COMMITTED_RUN
from tests.fakes.checkpoints import save


def tiny_config(url: str = "/runs/mine") -> RunConfig:
    tree = {
        "run": {"name": "mine", "url": url, "steps": 10},
        "model": {"config": {"model_type": "llama"}},
        "data": {"url": "/data", "sequence_length": 8, "global_batch": 4},
    }
    return RunConfig.model_validate(tree)


def test_two_drivers_agree_on_the_id_and_other_places_have_another() -> None:
    assert make_run_id("a", "s3://b/c") == make_run_id("a", "s3://b/c/")
    assert make_run_id("a", "s3://b/c") != make_run_id("a", "s3://b/d")


def test_a_node_without_an_installed_copy_of_this_project_can_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "raysume":
            raise PackageNotFoundError(name)
        return "1.2"

    monkeypatch.setattr(run_identity, "version", version)
    assert open_run_record(MemoryStore(), "r").is_new
    versions = metadata_of(tiny_config())["versions"]
    assert versions == {"raysume": "not installed", "ray": "1.2", "torch": "1.2", "transformers": "1.2"}


def test_the_second_driver_finds_the_start_of_the_first() -> None:
    store = MemoryStore()
    first = open_run_record(store, "r")
    second = open_run_record(store, "r")
    assert (first.is_new, second.is_new) == (True, False)
    assert second.start_unix_s == first.start_unix_s


def usable_steps(store: ObjectStore, config: RunConfig) -> list[int]:
    return [commit.step for commit in CommitLog(store, find_run_id(store, config)).commits()]


def test_looking_for_the_id_of_a_run_that_begins_writes_nothing() -> None:
    store = MemoryStore()
    assert find_run_id(store, tiny_config()) == make_run_id("mine", "/runs/mine")
    assert store.list("") == []


def test_a_copied_directory_knows_its_own_checkpoints(tmp_path: Path) -> None:
    original = open_store(str(tmp_path / "original"))
    first = open_run_record(original, COMMITTED_RUN)
    save(original, 10)
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    config = tiny_config(f"file://{tmp_path}/copy/")
    copy = open_store(config.run.url)
    assert usable_steps(copy, config) == [10]
    assert open_run_record(copy, find_run_id(copy, config)) == run_identity.RunIdentity(
        run_id=COMMITTED_RUN, start_unix_s=first.start_unix_s, is_new=False
    )


def test_a_run_whose_record_was_deleted_is_known_by_its_commits_and_goes_on_counting_time(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    config = tiny_config(str(tmp_path))
    log = EventLog(tmp_path / EVENTS, COMMITTED_RUN)
    log.emit("run_started", start_unix_s=1000.5, is_new=True)
    log.emit("step", step=1)
    log.close()
    save(store, 10)
    assert usable_steps(store, config) == [10]
    identity = open_run_record(store, find_run_id(store, config))
    assert (identity.run_id, identity.start_unix_s, identity.is_new) == (COMMITTED_RUN, 1000.5, False)
    assert json.loads(store.get(RUN))["run_id"] == COMMITTED_RUN
    assert open_run_record(store, find_run_id(store, config)) == identity


def test_a_store_that_refuses_is_a_config_error_that_names_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()

    def refuse(key: str, **_: object) -> bytes:
        raise StoreRefused("get", key, "access denied")

    monkeypatch.setattr(store, "get", refuse)
    with pytest.raises(ConfigError, match=r"/runs/mine: run\.url cannot be reached: .*access denied"):
        find_run_id(store, tiny_config())


def test_a_damaged_record_is_said_and_never_taken_for_a_new_run() -> None:
    store = MemoryStore()
    store.put(RUN, b'{"start_unix_s": 3')
    with pytest.raises(ConfigError, match=r"run\.json there cannot be read"):
        find_run_id(store, tiny_config())


def test_a_driver_that_took_the_run_for_another_does_not_go_on() -> None:
    store = MemoryStore()
    open_run_record(store, "mine-1")
    with pytest.raises(ConfigError, match="mine-1"):
        open_run_record(store, "mine-2")


def test_events_of_a_copy_in_a_bucket_are_kept_apart_from_those_of_the_original() -> None:
    assert events_path_of("s3://b/one", "mine-1") != events_path_of("s3://b/two", "mine-1")
