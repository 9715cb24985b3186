"""What keeps a Run from beginning is said before a cluster is started and leaves nothing behind. Real files and Leases.

The driver and the local cluster, which need Ray, are replaced; other drivers are Leases of processes of this machine.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator import early_refusals
from orchestrator.cli import app
from orchestrator.cli_start import exit_code_of
from orchestrator.config import RunConfig
from orchestrator.early_refusals import refuse_early
from orchestrator.errors import StartOutage
from orchestrator.exit_codes import ExitCode
from storage.errors import LeaseHeld, StoreUnavailable
from storage.keys import LEASES
from storage.lease import Lease, Owner, acquire, local_owner
from storage.lease_watch import watch_drivers
from storage.local_store import LocalStore
from tests.fakes.checkpoints import save
from tests.fakes.token_datasets import write_numbered_rows

runner = CliRunner()


def noting(started: list[str], entry: str) -> Callable[..., ExitCode]:
    def start(*_: object, **__: object) -> ExitCode:
        started.append(entry)
        return ExitCode.SUCCESS

    return start


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was started: nothing may be."""
    started: list[str] = []
    for name, entry in (("orchestrator.launch", "run_driver"), ("orchestrator.supervisor", "supervise")):
        module: Any = ModuleType(name)
        setattr(module, entry, noting(started, entry))
        module.SupervisorPlan = lambda **fields: SimpleNamespace(**fields)
        monkeypatch.setitem(sys.modules, name, module)
    return started


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    write_numbered_rows(str(tmp_path / "rows"), 20, sequence_length=16)
    settings = {
        "run": {"name": "r", "url": str(tmp_path / "run"), "steps": 200},
        "model": {"config": {"model_type": "llama", "vocab_size": 64}},
        "data": {"url": str(tmp_path / "rows"), "sequence_length": 16, "global_batch": 4},
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(settings))
    return path


def config_of(path: Path) -> RunConfig:
    return RunConfig.model_validate_json(path.read_text())


@pytest.mark.parametrize("nodes", [[], ["--local-nodes", "2"]])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("data.url=nowhere", "holds no dataset: run `raysume data prepare`"),
        ("data.sequence_length=8", "data.sequence_length is 8, the dataset was packed to 16"),
        ("run.resume=77", "no usable Checkpoint of step 77 (usable steps: none)"),
    ],
)
def test_what_cannot_begin_is_refused_first_and_leaves_nothing(
    started: list[str], config_path: Path, tmp_path: Path, change: str, words: str, nodes: list[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    ended = runner.invoke(app, ["run", str(config_path), change, *nodes])
    assert ended.exit_code == ExitCode.CONFIG_ERROR, ended.output
    assert words in ended.stderr
    assert started == []
    assert sorted(tmp_path.rglob("*")) == before


def test_what_can_begin_does(started: list[str], config_path: Path) -> None:
    for nodes in ([], ["--local-nodes", "2"]):
        assert runner.invoke(app, ["run", str(config_path), *nodes]).exit_code == ExitCode.SUCCESS
    assert started == ["run_driver", "supervise"]


def test_a_dataset_that_is_still_to_be_made_is_no_reason(config_path: Path, tmp_path: Path) -> None:
    config = config_of(config_path)
    there = config.data.model_dump() | {"url": str(tmp_path / "new"), "prepare": {"source": "stdlib"}}
    refuse_early(config.model_validate(config.model_dump() | {"data": there}))
    assert not (tmp_path / "new").exists()


class Driver:
    """Another driver, whose Lease is renewed whenever somebody who watches pauses."""

    def __init__(self, patch: pytest.MonkeyPatch, lease: Lease, *, is_renewed: bool) -> None:
        self.now_s = 0.0

        def pause(seconds: float) -> None:
            self.now_s += seconds
            if is_renewed:
                lease.renew()

        def watch(store: LocalStore, **how: Any) -> Any:
            return watch_drivers(store, **how, clock=lambda: self.now_s, sleep=pause)

        patch.setattr(early_refusals, "watch_drivers", watch)


def lease_of(tmp_path: Path, owner: Owner | None = None) -> Lease:
    return acquire(LocalStore(tmp_path / "run"), "r-0", ttl_s=10.0, owner=owner)


@pytest.mark.parametrize("nodes", [[], ["--local-nodes", "2"]])
def test_a_run_that_a_living_driver_holds_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, started: list[str], config_path: Path, tmp_path: Path, nodes: list[str]
) -> None:
    lease = lease_of(tmp_path)
    Driver(monkeypatch, lease, is_renewed=True)
    ended = runner.invoke(app, ["run", str(config_path), *nodes])
    assert ended.exit_code == ExitCode.REFUSED
    assert f"driver {lease.nonce}, pid {os.getpid()}" in ended.stderr
    assert started == []
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LEASES.strip("/")]


def test_a_process_that_only_has_the_pid_of_a_driver_that_died_holds_nothing(
    monkeypatch: pytest.MonkeyPatch, config_path: Path, tmp_path: Path
) -> None:
    watched = Driver(monkeypatch, lease_of(tmp_path), is_renewed=False)
    refuse_early(config_of(config_path))
    assert watched.now_s > 0


def test_drivers_that_died_here_or_run_elsewhere_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, config_path: Path, tmp_path: Path
) -> None:
    here = local_owner()
    gone = Owner(host=here.host, pid=2**22 + 1, boot_id=here.boot_id)
    elsewhere = Owner(host="far", pid=1, boot_id="other")
    for owner in (gone, elsewhere):
        (tmp_path / "run").mkdir(exist_ok=True)
        lease = lease_of(tmp_path, owner)
        watched = Driver(monkeypatch, lease, is_renewed=True)
        refuse_early(config_of(config_path))
        assert watched.now_s == 0
        lease.release()


def test_a_step_that_is_there_and_another_run_beside_own_checkpoints_are_no_reason(
    config_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (30, 40):
        save(LocalStore(tmp_path / "run"), step)
    config = config_of(config_path)
    for wish in ("40", "auto", str(tmp_path / "other")):
        refuse_early(config.model_copy(update={"run": config.run.model_copy(update={"resume": wish})}))
    assert caplog.messages == []


def test_a_store_that_is_away_is_an_outage(monkeypatch: pytest.MonkeyPatch, config_path: Path) -> None:
    def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("list", LEASES, "no answer")

    monkeypatch.setattr(early_refusals, "watch_drivers", away)
    with pytest.raises(StartOutage, match="try again when it is back"):
        refuse_early(config_of(config_path))


def test_a_lease_that_is_held_has_its_exit_code() -> None:
    def drive() -> int:
        raise LeaseHeld("r", "driver 0000aaaa")

    assert exit_code_of(drive) == ExitCode.REFUSED
