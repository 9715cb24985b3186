"""The Python API before anything runs: what Ray Train's configs change, what they are refused, what cannot be sent."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import ray.train

from orchestrator.config import RunConfig
from orchestrator.errors import ConfigError
from orchestrator.trainer import ElasticTrainer


def run_config(**sections: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "run": {"name": "mine", "url": "/runs/mine", "steps": 10},
        "model": {"config": {"model_type": "llama"}},
        "data": {"url": "/data", "sequence_length": 8, "global_batch": 4},
    }
    return RunConfig.model_validate(tree | sections)


def test_without_rays_configs_the_run_configuration_stands() -> None:
    config = run_config()
    assert ElasticTrainer(config=config).config == config


def test_what_rays_configs_leave_unset_changes_nothing() -> None:
    config = run_config(failure={"max_user_errors": 4}, checkpoint={"keep": 7}, world={"max_workers": 3})
    trainer = ElasticTrainer(config=config, scaling_config=ray.train.ScalingConfig(), run_config=ray.train.RunConfig())
    assert trainer.config == config


@pytest.mark.parametrize(("num_workers", "bounds"), [(3, (3, 3)), ((2, 5), (2, 5))])
def test_num_workers_is_a_number_or_a_range(num_workers: Any, bounds: tuple[int, int]) -> None:
    scaling = ray.train.ScalingConfig(num_workers=num_workers)
    world = ElasticTrainer(config=run_config(), scaling_config=scaling).config.world
    assert (world.min_workers, world.max_workers) == bounds


def test_use_gpu_asks_for_one_beside_the_other_resources() -> None:
    scaling = ray.train.ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"CPU": 4})
    world = ElasticTrainer(config=run_config(), scaling_config=scaling).config.world
    assert world.resources_per_worker == {"CPU": 4.0, "GPU": 1.0}


def test_name_place_budgets_and_retention_come_from_rays_run_config(tmp_path: Path) -> None:
    given = ray.train.RunConfig(
        name="theirs",
        storage_path=str(tmp_path),
        failure_config=ray.train.FailureConfig(max_failures=2),
        checkpoint_config=ray.train.CheckpointConfig(num_to_keep=5),
    )
    config = ElasticTrainer(config=run_config(), run_config=given).config
    assert (config.run.name, config.run.url) == ("theirs", f"{tmp_path}/theirs")
    assert (config.failure.max_user_errors, config.checkpoint.keep) == (2, 5)


def test_a_place_without_a_name_keeps_the_runs_name() -> None:
    config = ElasticTrainer(config=run_config(), run_config=ray.train.RunConfig(storage_path="s3://bucket/x")).config
    assert (config.run.name, config.run.url) == ("mine", "s3://bucket/x/mine")


@pytest.mark.parametrize(
    ("configs", "named"),
    [
        ({"scaling_config": ray.train.ScalingConfig(placement_strategy="SPREAD")}, "scaling_config.placement_strategy"),
        (
            {
                "run_config": ray.train.RunConfig(
                    checkpoint_config=ray.train.CheckpointConfig(checkpoint_score_attribute="loss")
                )
            },
            "run_config.checkpoint_config.checkpoint_score_attribute",
        ),
    ],
)
def test_a_field_without_meaning_is_refused_by_name(configs: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ElasticTrainer(config=run_config(), **configs)


def test_rays_configs_meet_the_checks_of_the_run_configuration() -> None:
    with pytest.raises(ValueError, match=r"run\.name"):
        ElasticTrainer(config=run_config(), run_config=ray.train.RunConfig(name="two words"))


def test_a_loop_that_cannot_be_sent_is_refused_before_anything_starts() -> None:
    lock = threading.Lock()

    def loop(_session: Any) -> None:
        with lock:
            pass

    with pytest.raises(ConfigError, match="train_loop cannot be sent to the workers") as caught:
        ElasticTrainer(loop, config=run_config()).fit()
    assert "lock" in str(caught.value)


def test_a_named_cluster_that_is_away_is_not_replaced_by_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def init(*, address: str, **_: Any) -> None:
        asked.append(address)
        raise ConnectionError("nobody listens")

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1:6379: no Ray cluster answers there: nobody listens"):
        ElasticTrainer(config=run_config()).fit()
    assert asked == ["10.0.0.1:6379"]
