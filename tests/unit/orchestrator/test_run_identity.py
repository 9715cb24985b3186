"""Who a Run is, on machines where this project is installed and where it only came along as a working directory."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from orchestrator import run_identity
from orchestrator.config import RunConfig
from orchestrator.run_identity import make_run_id, metadata_of, open_run_record
from storage.memory_store import MemoryStore


def tiny_config() -> RunConfig:
    tree = {
        "run": {"name": "mine", "url": "/runs/mine", "steps": 10},
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
