"""What a schedule needs: refusals before anything is started, and the fittings of the cluster. Pure but for probes."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator import chaos_needs
from orchestrator.chaos import parse_chaos
from orchestrator.chaos_needs import check_schedule, fittings_for, store_endpoint
from orchestrator.config import RunConfig
from orchestrator.errors import ChaosSpecError
from orchestrator.load_config import load_config
from orchestrator.local_cluster import Fittings


def config(*overrides: str) -> RunConfig:
    return load_config(Path("clusters/local/run.yaml"), list(overrides))


S3 = "run.url=s3://bucket/run"
ENDPOINT = "checkpoint.store.endpoint_url=http://127.0.0.1:9000"


@pytest.fixture(autouse=True)
def _no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)


def test_plain_faults_ask_nothing_of_the_machine() -> None:
    actions = parse_chaos("kill-node@1,slow-node@2,oom-worker@3,kill-keeper@4,kill-coordinator@5,kill-driver@6")
    check_schedule(actions, config(), 3)
    assert fittings_for(actions, config()) == Fittings()


def test_the_cluster_is_fitted_for_the_faults_of_the_schedule_alone() -> None:
    settings = config("checkpoint.local_disk.keep_free_bytes=1000")
    actions = parse_chaos("disk-full@1,raise-in-worker@2")
    assert fittings_for(actions, settings) == Fittings(disk_bytes=1000 + (256 << 20), has_seams=True)
    actions = parse_chaos("restart-head@1,cut-node@2")
    assert fittings_for(actions, settings) == Fittings(has_durable_head=True, has_own_networks=True)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "run.url must be s3://"),
        ((S3,), "has none"),
        ((S3, "checkpoint.store.endpoint_url=https://s3.example.org"), "has https://s3.example.org"),
    ],
)
def test_an_outage_of_a_store_that_no_proxy_can_stand_before_is_refused(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ChaosSpecError, match="an outage is made by a proxy") as caught:
        check_schedule(parse_chaos("kill-node@3,store-outage@5:60s"), config(*overrides), 2)
    assert caught.value.part == "store-outage@5:60s"
    assert said in str(caught.value)


def test_the_endpoint_is_the_configurations_or_else_the_environments() -> None:
    environment = {"AWS_ENDPOINT_URL": "http://general", "AWS_ENDPOINT_URL_S3": "http://s3"}
    assert store_endpoint(config(S3, ENDPOINT), environment) == "http://127.0.0.1:9000"
    assert store_endpoint(config(S3), environment) == "http://s3"
    assert store_endpoint(config(S3), {}) is None
    assert store_endpoint(config(), environment) is None
    check_schedule(parse_chaos("store-outage@5:60s"), config(S3, ENDPOINT), 1)


def test_what_the_machine_does_not_allow_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos_needs, "why_no_networks", lambda: "cut-node needs root")
    monkeypatch.setattr(chaos_needs, "why_no_disks", lambda: "no disk can be mounted")
    with pytest.raises(ChaosSpecError, match=r"'cut-node@5': cut-node needs root"):
        check_schedule(parse_chaos("cut-node@5"), config(), 2)
    with pytest.raises(ChaosSpecError, match=r"'disk-full@5': no disk can be mounted"):
        check_schedule(parse_chaos("disk-full@5"), config(), 2)


def test_a_disk_that_is_not_the_nodes_own_is_not_filled() -> None:
    with pytest.raises(ChaosSpecError, match=r"local_disk\.directory is set"):
        check_schedule(parse_chaos("disk-full@5"), config("checkpoint.local_disk.directory=/var/spool"), 2)


def test_a_number_of_workers_that_the_driver_would_refuse_is_refused_before_the_run() -> None:
    settings = config("world.min_workers=2")
    check_schedule(parse_chaos("scale:2@4,scale:4@8"), settings, 4)
    with pytest.raises(ChaosSpecError, match=r"fewer than world.min_workers \(2\)"):
        check_schedule(parse_chaos("scale:1@4"), settings, 4)
    with pytest.raises(ChaosSpecError, match="a step has 8 leaves"):
        check_schedule(parse_chaos("scale:9@4"), settings, 4)
