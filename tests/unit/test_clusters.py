"""The shipped cluster files are right, and a wrong one is refused with the line to change. No cloud is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.load_config import load_config
from orchestrator.validate_cluster import Problem, main, validate_cluster_file

CLUSTERS = Path(__file__).parents[2] / "clusters"
AWS = CLUSTERS / "aws" / "cluster.yaml"

# Field names of KubeRay's ray.io/v1 types and of the parts of a Kubernetes pod that clusters/kuberay uses.
_POD_SPEC = {
    "affinity", "containers", "nodeSelector", "priorityClassName", "serviceAccountName",
    "terminationGracePeriodSeconds", "tolerations", "volumes",
}  # fmt: skip
_TOLERATION = {"effect", "key", "operator", "tolerationSeconds", "value"}
_VOLUME = {"configMap", "emptyDir", "name", "persistentVolumeClaim", "secret"}
_CONTAINER = {
    "name", "image", "imagePullPolicy", "command", "args", "env", "envFrom", "ports", "resources", "volumeMounts",
    "lifecycle", "livenessProbe", "readinessProbe", "startupProbe", "securityContext", "workingDir",
}  # fmt: skip
_JOB = {
    "activeDeadlineSeconds", "backoffLimit", "clusterSelector", "deletionStrategy", "entrypoint", "entrypointNumCpus",
    "entrypointNumGpus", "entrypointResources", "jobId", "managedBy", "metadata", "rayClusterSpec", "runtimeEnvYAML",
    "shutdownAfterJobFinishes", "submissionMode", "submitterConfig", "submitterPodTemplate", "suspend",
    "ttlSecondsAfterFinished",
}  # fmt: skip
_RAY_CLUSTER = {
    "authOptions", "autoscalerOptions", "enableInTreeAutoscaling", "gcsFaultToleranceOptions", "headGroupSpec",
    "headServiceAnnotations", "managedBy", "rayVersion", "suspend", "workerGroupSpecs",
}  # fmt: skip
_AUTOSCALER = {
    "env", "envFrom", "idleTimeoutSeconds", "image", "imagePullPolicy", "resources", "securityContext",
    "upscalingMode", "version", "volumeMounts",
}  # fmt: skip
_HEAD_GROUP = {"enableIngress", "headService", "rayStartParams", "serviceType", "template"}
_WORKER_GROUP = {
    "groupName", "idleTimeoutSeconds", "maxReplicas", "minReplicas", "numOfHosts", "rayStartParams", "replicas",
    "scaleStrategy", "suspend", "template",
}  # fmt: skip


@pytest.fixture
def rayjob() -> dict[str, Any]:
    loaded = yaml.safe_load((CLUSTERS / "kuberay" / "rayjob.yaml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def edited(tmp_path: Path, old: str, new: str) -> Path:
    text = AWS.read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {AWS}"
    path = tmp_path / "cluster.yaml"
    path.write_text(text.replace(old, new))
    return path


def line_of(path: Path, text: str) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line)


def only(problems: list[Problem]) -> Problem:
    assert len(problems) == 1, problems
    return problems[0]


def test_the_shipped_aws_file_has_no_problem() -> None:
    assert validate_cluster_file(AWS) == []


def test_ray_itself_accepts_the_shipped_aws_file() -> None:
    from ray.autoscaler._private.util import fillout_defaults, prepare_config, validate_config

    config = yaml.safe_load(AWS.read_text())
    validate_config(fillout_defaults(config))
    prepared = prepare_config(config)
    workers = prepared["available_node_types"]["spot_gpu"]
    assert (workers["min_workers"], workers["max_workers"]) == (2, 8)


def test_the_aws_head_is_on_demand_and_the_workers_are_spot() -> None:
    types = yaml.safe_load(AWS.read_text())["available_node_types"]
    assert "InstanceMarketOptions" not in types["head"]["node_config"]
    assert types["spot_gpu"]["node_config"]["InstanceMarketOptions"]["MarketType"] == "spot"


def test_a_node_type_without_max_workers_is_named_with_its_line(tmp_path: Path) -> None:
    path = edited(tmp_path, "    min_workers: 2\n    max_workers: 8\n", "    min_workers: 2\n")
    problem = only(validate_cluster_file(path))
    assert problem.path == "available_node_types.spot_gpu"
    assert problem.line == line_of(path, "  spot_gpu:")
    assert "max_workers" in problem.message


def test_a_wrong_nested_key_is_named_with_its_line_and_the_nearest_valid_one(tmp_path: Path) -> None:
    path = edited(tmp_path, "resources: {CPU: 48, GPU: 4}", "resource: {CPU: 48, GPU: 4}\n    resources: {}")
    problem = only(validate_cluster_file(path))
    assert problem.path == "available_node_types.spot_gpu.resource"
    assert problem.line == line_of(path, "    resource:")
    assert "did you mean resources?" in problem.message


def test_an_unknown_key_at_the_top_is_named_with_its_line(tmp_path: Path) -> None:
    path = edited(tmp_path, "idle_timeout_minutes: 10", "idle_timeout_minute: 10")
    problem = only(validate_cluster_file(path))
    assert (problem.path, problem.line) == ("idle_timeout_minute", line_of(path, "idle_timeout_minute:"))
    assert "did you mean idle_timeout_minutes?" in problem.message


def test_a_missing_required_key_is_named(tmp_path: Path) -> None:
    path = edited(tmp_path, "    resources: {CPU: 48, GPU: 4}\n", "")
    problem = only(validate_cluster_file(path))
    assert problem.path == "available_node_types.spot_gpu"
    assert "'resources' is a required property" in problem.message


def test_a_minimum_above_the_maximum_is_named_with_its_line(tmp_path: Path) -> None:
    path = edited(tmp_path, "    min_workers: 2\n    max_workers: 8\n", "    min_workers: 6\n    max_workers: 4\n")
    problem = only(validate_cluster_file(path))
    assert problem.path == "available_node_types.spot_gpu.min_workers"
    assert problem.line == line_of(path, "min_workers: 6")
    assert "6 exceeds max_workers 4" in problem.message


def test_minima_above_the_global_maximum_are_refused(tmp_path: Path) -> None:
    path = edited(tmp_path, "\nmax_workers: 8 ", "\nmax_workers: 1 ")
    problem = only(validate_cluster_file(path))
    assert (problem.path, problem.line) == ("max_workers", line_of(path, "max_workers: 1 "))


def test_a_head_type_that_is_no_node_type_is_named_with_its_line(tmp_path: Path) -> None:
    path = edited(tmp_path, "\nhead_node_type: head\n", "\nhead_node_type: haed\n")
    problem = only(validate_cluster_file(path))
    assert (problem.path, problem.line) == ("head_node_type", line_of(path, "head_node_type:"))
    assert "did you mean head?" in problem.message


@pytest.mark.parametrize(("text", "says"), [("a: [1", "not valid YAML"), ("- 1\n", "must be a mapping")])
def test_a_file_that_is_no_mapping_is_one_problem(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    assert says in only(validate_cluster_file(path)).message


def test_the_command_fails_and_prints_file_line_and_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = edited(tmp_path, "\nhead_node_type: head\n", "\nhead_node_type: haed\n")
    assert main([str(AWS)]) == 0
    assert main([str(AWS), str(path)]) == 1
    assert f"{path}: line {line_of(path, 'head_node_type:')}: head_node_type:" in capsys.readouterr().err


def test_every_field_of_the_rayjob_is_one_that_kuberay_knows(rayjob: dict[str, Any]) -> None:
    spec = rayjob["spec"]
    cluster = spec["rayClusterSpec"]
    assert (rayjob["apiVersion"], rayjob["kind"]) == ("ray.io/v1", "RayJob")
    assert set(rayjob) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(spec) <= _JOB
    assert set(spec["submitterConfig"]) <= {"backoffLimit"}
    assert set(cluster) <= _RAY_CLUSTER
    assert set(cluster["autoscalerOptions"]) <= _AUTOSCALER
    assert set(cluster["headGroupSpec"]) <= _HEAD_GROUP
    for group in cluster["workerGroupSpecs"]:
        assert set(group) <= _WORKER_GROUP


def test_every_pod_of_the_rayjob_uses_fields_that_kubernetes_knows(rayjob: dict[str, Any]) -> None:
    cluster = rayjob["spec"]["rayClusterSpec"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        assert set(group["template"]) <= {"metadata", "spec"}
        pod = group["template"]["spec"]
        assert set(pod) <= _POD_SPEC
        assert all(set(toleration) <= _TOLERATION for toleration in pod.get("tolerations", []))
        assert all(set(volume) <= _VOLUME for volume in pod.get("volumes", []))
        for container in pod["containers"]:
            assert set(container) <= _CONTAINER
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounted <= {volume["name"] for volume in pod.get("volumes", [])}


def test_the_rayjob_fits_ray_and_its_pods_agree_on_authentication(rayjob: dict[str, Any]) -> None:
    import ray

    spec = rayjob["spec"]
    cluster = spec["rayClusterSpec"]
    modes = {yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]["RAY_AUTH_MODE"]}
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        container = group["template"]["spec"]["containers"][0]
        modes |= {variable["value"] for variable in container["env"] if variable["name"] == "RAY_AUTH_MODE"}
        # Kubernetes reads rayStartParams as text; a bare number is refused by the API server.
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    assert len(modes) == 1
    assert cluster["rayVersion"] == ray.__version__
    assert spec["submissionMode"] in {"K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"}


def test_the_workers_get_time_to_leave_before_they_are_killed(rayjob: dict[str, Any]) -> None:
    group = rayjob["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    pod = group["template"]["spec"]
    command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    deadline_s = int(command.split("--deadline-remaining-seconds ")[1].split(";")[0])
    assert "DRAIN_NODE_REASON_PREEMPTION" in command
    assert 0 < deadline_s < pod["terminationGracePeriodSeconds"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_shipped_run_configuration_loads(path: Path) -> None:
    if path.name in ("cluster.yaml", "rayjob.yaml"):
        assert (path.parent / "run.yaml").exists(), "each place has a run configuration that fits it"
        return
    config = load_config(path)
    assert config.world.min_workers <= config.world.max_workers


@pytest.mark.parametrize("place", ["aws", "kuberay"])
def test_the_run_fits_its_cluster(place: str, rayjob: dict[str, Any]) -> None:
    config = load_config(CLUSTERS / place / "run.yaml")
    if place == "aws":
        workers = yaml.safe_load(AWS.read_text())["available_node_types"]["spot_gpu"]
        num_nodes, gpus, cpus = workers["max_workers"], workers["resources"]["GPU"], workers["resources"]["CPU"]
    else:
        group = rayjob["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        num_nodes, gpus, cpus = group["maxReplicas"], int(limits["nvidia.com/gpu"]), int(limits["cpu"])
    assert config.world.workers_per_node == gpus
    assert config.world.max_workers == num_nodes * gpus
    assert config.world.resources_per_worker["CPU"] * gpus <= cpus
    assert config.run.url.startswith("s3://")
