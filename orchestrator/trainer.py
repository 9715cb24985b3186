"""The Python API: `ElasticTrainer(train_loop, ...).fit()`, with Ray Train's public config types where they fit.

A user's loop gets a Session and is called again in the same warm process after every regroup. Everything else is the
run configuration's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.config import RunConfig
from orchestrator.exit_codes import ExitCode
from orchestrator.options import DriverOptions

if TYPE_CHECKING:
    import ray.train

__all__ = ["ElasticTrainer", "FitResult"]


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

    ``config`` holds all settings. ``scaling_config`` (ray.train.ScalingConfig) and ``run_config``
    (ray.train.RunConfig), when given, replace the settings they overlap with: num_workers, use_gpu and
    resources_per_worker; name, storage_path and failure_config.max_failures. Fields of theirs that have no meaning here
    are refused by name.
    """

    def __init__(
        self,
        train_loop: Callable[[Any], None] | None = None,
        train_loop_config: Mapping[str, Any] | None = None,
        *,
        config: RunConfig,
        scaling_config: ray.train.ScalingConfig | None = None,
        run_config: ray.train.RunConfig | None = None,
        options: DriverOptions | None = None,
    ) -> None:
        self._train_loop = train_loop
        self._loop_config = dict(train_loop_config or {})
        self._options = options or DriverOptions()
        self.config = _with_ray_configs(config, scaling_config, run_config)

    def fit(self) -> FitResult:
        """Drive the Run to its end. Raises ConfigError when it could not begin."""
        from orchestrator.launch import run_driver  # loads ray: here, so that naming this class stays cheap

        code = run_driver(self.config, self._options, train_loop=self._train_loop, loop_config=self._loop_config)
        return FitResult(exit_code=code, url=self.config.run.url)


def _with_ray_configs(
    config: RunConfig, scaling: ray.train.ScalingConfig | None, run: ray.train.RunConfig | None
) -> RunConfig:
    tree = config.model_dump()
    if scaling is not None:
        tree["world"].update(_world_of(scaling))
    if run is not None:
        if run.name is not None:
            tree["run"]["name"] = run.name
        if run.storage_path is not None:
            tree["run"]["url"] = f"{str(run.storage_path).rstrip('/')}/{tree['run']['name']}"
        if run.failure_config is not None:
            tree["failure"]["max_user_errors"] = run.failure_config.max_failures
    return RunConfig.model_validate(tree)


def _world_of(scaling: ray.train.ScalingConfig) -> dict[str, Any]:
    if getattr(scaling, "topology", None):
        raise ValueError("scaling_config.topology has no meaning for an elastic world; leave it out")
    workers = scaling.num_workers
    least, most = workers if isinstance(workers, tuple) else (workers, workers)
    world: dict[str, Any] = {"min_workers": least, "max_workers": most}
    asked = scaling.resources_per_worker
    if asked is not None and not isinstance(asked, dict):
        raise ValueError("scaling_config.resources_per_worker must be a plain dict of resource name to amount")
    resources: dict[str, Any] = dict(asked or {})
    if scaling.use_gpu:
        resources.setdefault("GPU", 1.0)
    if resources:
        world["resources_per_worker"] = resources
    return world
