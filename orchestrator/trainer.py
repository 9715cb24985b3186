"""The Python API: `ElasticTrainer(train_loop, ...).fit()`, with Ray Train's public config types where they fit.

A user's loop gets a Session and is called again in the same warm process after every regroup. Everything else is the
run configuration's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.config import RunConfig
from orchestrator.errors import ConfigError
from orchestrator.exit_codes import ExitCode
from orchestrator.load_config import load_config
from orchestrator.options import DriverOptions

if TYPE_CHECKING:
    import ray.train

__all__ = ["ElasticTrainer", "FitResult"]

_INVENTED_NAME = "ray_train_run-"


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """How the Run ended for this driver and where everything of it lies."""

    exit_code: ExitCode
    url: str

    @property
    def is_finished(self) -> bool:
        return self.exit_code is ExitCode.SUCCESS


class ElasticTrainer:
    """Runs ``train_loop(session)`` on every worker of an elastic World.

    ``config`` holds all settings, or is the path of a file that does. What is set in ``scaling_config``
    (ray.train.ScalingConfig) and ``run_config`` (ray.train.RunConfig) replaces the settings it overlaps with:
    num_workers, use_gpu, resources_per_worker; name, storage_path, failure_config.max_failures and
    .max_preemption_failures, checkpoint_config.num_to_keep. Anything else set there has no meaning here and is refused
    by name.
    """

    def __init__(
        self,
        train_loop: Callable[[Any], None] | None = None,
        train_loop_config: Mapping[str, Any] | None = None,
        *,
        config: RunConfig | str | os.PathLike[str],
        scaling_config: ray.train.ScalingConfig | None = None,
        run_config: ray.train.RunConfig | None = None,
        options: DriverOptions | None = None,
    ) -> None:
        self._train_loop = train_loop
        self._loop_config = dict(train_loop_config or {})
        self._options = options or DriverOptions()
        settings = config if isinstance(config, RunConfig) else load_config(Path(config))
        self.config = _with_ray_configs(settings, scaling_config, run_config)

    def fit(self) -> FitResult:
        """Drive the Run to its end. Raises ConfigError when it could not begin."""
        _check_can_travel("train_loop", self._train_loop)
        _check_can_travel("train_loop_config", self._loop_config)
        from orchestrator.launch import run_driver  # loads ray: here, so that naming this class stays cheap

        code = run_driver(self.config, self._options, train_loop=self._train_loop, loop_config=self._loop_config)
        return FitResult(exit_code=code, url=self.config.run.url)


def _check_can_travel(name: str, value: object) -> None:
    from ray import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception as error:
        text = (
            f"{name} cannot be sent to the workers: {type(error).__name__}: {error}; "
            "open files, locks and connections inside the loop instead of around it"
        )
        raise ConfigError("ElasticTrainer", (text,)) from error


def _with_ray_configs(
    config: RunConfig, scaling: ray.train.ScalingConfig | None, run: ray.train.RunConfig | None
) -> RunConfig:
    tree = config.model_dump()
    if scaling is not None:
        _put_scaling(tree["world"], scaling)
    if run is not None:
        _put_run(tree, run)
    return RunConfig.model_validate(tree)


def _put_scaling(world: dict[str, Any], scaling: ray.train.ScalingConfig) -> None:
    changed = _changed(scaling)
    workers = changed.pop("num_workers", None)
    if workers is not None:
        least, most = workers if isinstance(workers, tuple) else (workers, workers)
        world.update(min_workers=least, max_workers=most)
    asked = changed.pop("resources_per_worker", None)
    if asked is not None:
        if not isinstance(asked, dict) or not all(isinstance(amount, int | float) for amount in asked.values()):
            raise ValueError("scaling_config.resources_per_worker must be a plain dict of resource name to amount")
        world["resources_per_worker"] = dict(asked)
    if changed.pop("use_gpu", False):
        world["resources_per_worker"] = {"GPU": 1.0, **world["resources_per_worker"]}
    _refuse("scaling_config", changed)


def _put_run(tree: dict[str, Any], run: ray.train.RunConfig) -> None:
    changed = _changed(run)
    name, place = changed.pop("name", None), changed.pop("storage_path", None)
    if name is not None:
        tree["run"]["name"] = name
    if place is not None:
        tree["run"]["url"] = f"{str(place).rstrip('/')}/{tree['run']['name']}"
    failures = _changed(changed.pop("failure_config", None))
    if "max_failures" in failures:
        tree["failure"]["max_user_errors"] = failures.pop("max_failures")
    if "max_preemption_failures" in failures:
        tree["failure"]["max_preemptions"] = failures.pop("max_preemption_failures")
    _refuse("run_config.failure_config", failures)
    kept = _changed(changed.pop("checkpoint_config", None))
    if "num_to_keep" in kept:
        tree["checkpoint"]["keep"] = kept.pop("num_to_keep")
    _refuse("run_config.checkpoint_config", kept)
    _refuse("run_config", changed)


def _changed(given: Any) -> dict[str, Any]:
    """The fields of one of Ray's configs that differ from what it holds when nothing is set."""
    if given is None:
        return {}
    plain = vars(type(given)())
    changed = {name: value for name, value in vars(given).items() if repr(value) != repr(plain.get(name))}
    if str(changed.get("name", "")).startswith(_INVENTED_NAME):
        del changed["name"]  # made up from the time of day where none was given
    return changed


def _refuse(where: str, changed: Mapping[str, Any]) -> None:
    if changed:
        names = ", ".join(f"{where}.{name}" for name in sorted(changed))
        raise ValueError(f"{names}: no meaning for an elastic world; leave it out, or set it in the run configuration")
