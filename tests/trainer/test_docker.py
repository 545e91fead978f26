"""Images, compose file and manifest: linted, and what they run is what our and Ray's own command lines accept.

No container is built or started here: there is no Docker daemon.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.ray_cluster import check_ray_command
from trainer.settings.compose import compose
from trainer.settings.redact import is_secret

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
RAYJOB = yaml.safe_load((DOCKER / "rayjob.yaml").read_text())
FIELDS = {
    "spec": (
        "activeDeadlineSeconds backoffLimit clusterSelector deletionStrategy entrypoint entrypointNumCpus entrypointNumGpus "
        "entrypointResources jobId managedBy metadata preRunningDeadlineSeconds rayClusterSpec runtimeEnvYAML "
        "shutdownAfterJobFinishes submissionMode submitterConfig submitterPodTemplate suspend ttlSecondsAfterFinished"
    ),
    "cluster": (
        "authOptions autoscalerOptions enableInTreeAutoscaling gcsFaultToleranceOptions headGroupSpec headServiceAnnotations "
        "managedBy networkPolicy rayVersion suspend upgradeStrategy workerGroupSpecs"
    ),
    "head": "enableIngress headService labels rayStartParams resources serviceType template",
    "worker": (
        "groupName idleTimeoutSeconds labels maxReplicas minReplicas numOfHosts rayStartParams replicas resources "
        "scaleStrategy suspend template"
    ),
}
"""Fields that KubeRay's RayJob (ray.io/v1, 1.5.1) has at each level."""


def dockerfile(name: str) -> list[list[str]]:
    """Instructions, each split into words."""
    text = re.sub(r"^#.*\n", "", (DOCKER / f"{name}.Dockerfile").read_text(), flags=re.MULTILINE)
    return [line.split() for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def test_the_dockerfiles_are_linted():
    files = [str(DOCKER / f"{name}.Dockerfile") for name in ("cpu", "gpu")]
    linter = str(Path(sys.executable).parent / "hadolint")
    done = subprocess.run(
        [linter, "--config", str(DOCKER / "hadolint.yaml"), *files], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("name", "target"), [("cpu", "install"), ("gpu", "install-gpu")])
def test_an_image_installs_by_the_makefile_from_files_that_it_copies(name, target):
    lines = dockerfile(name)
    copied = {source for line in lines if line[0] == "COPY" for source in line[1:-1]}
    runs = [" ".join(line[1:]) for line in lines if line[0] == "RUN"]
    assert any(f"make {target} " in run for run in runs)
    assert not any("pip" in run for run in runs)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert all((ROOT / source).exists() and source not in ignored for source in copied)
    assert {"Makefile", "pyproject.toml", "requirements", "configs", "rlframe", "workers", "trainer"} <= copied
    plan = subprocess.run(["make", "-n", target, "VENV=/nowhere/venv"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "-m venv /nowhere/venv" in plan.stdout and "--editable" in plan.stdout


def test_the_compose_file_starts_a_head_and_two_workers_by_commands_that_ray_knows():
    head, worker = COMPOSE["services"]["head"], COMPOSE["services"]["worker"]
    assert worker["deploy"]["replicas"] == 2
    for command in (head["command"], worker["command"], head["healthcheck"]["test"][1:]):
        check_ray_command(command)
    assert "--head" in head["command"] and "--address=head:6379" in worker["command"]
    for service in (head, worker):
        assert (ROOT / "docker" / service["build"]["context"] / service["build"]["dockerfile"]).exists()
        assert service["environment"]["RAY_AUTH_MODE"] == "token"
    assert head["ports"] == ["127.0.0.1:8265:8265"], "only this machine reaches the dashboard"


def test_the_manifest_has_fields_that_kuberay_knows():
    spec = RAYJOB["spec"]
    cluster = spec["rayClusterSpec"]
    assert (RAYJOB["apiVersion"], RAYJOB["kind"]) == ("ray.io/v1", "RayJob")
    levels = [("spec", spec), ("cluster", cluster), ("head", cluster["headGroupSpec"])]
    levels += [("worker", group) for group in cluster["workerGroupSpecs"]]
    for level, there in levels:
        assert set(there) <= set(FIELDS[level].split()), level
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        (container,) = group["template"]["spec"]["containers"]
        volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_the_manifest_runs_a_job_that_composes_and_fits_its_cluster():
    words = shlex.split(RAYJOB["spec"]["entrypoint"])
    assert words[:2] == ["rlframe", "train"]
    config = compose(words[2:])
    groups = RAYJOB["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    there = sum(g["replicas"] * g["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for g in groups)
    assert config.actor.ranks * config.actor.gpus + config.rollout.workers * config.rollout.gpus == there
    assert config.run_dir.startswith("/shared/")


def test_ray_of_the_manifest_is_the_pinned_one():
    pinned = re.search(r"^ray==(.+)$", (ROOT / "requirements" / "cpu.txt").read_text(), re.MULTILINE)
    assert pinned and RAYJOB["spec"]["rayClusterSpec"]["rayVersion"] == pinned[1]


def test_no_secret_is_written_down():
    """Values come from the caller's environment or from a Kubernetes secret."""
    for service in COMPOSE["services"].values():
        for name, value in service.get("environment", {}).items():
            assert not is_secret(name) or value.startswith("${"), name
    assert not [name for name in yaml.safe_load(RAYJOB["spec"]["runtimeEnvYAML"])["env_vars"] if is_secret(name)]
    cluster = RAYJOB["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        for variable in group["template"]["spec"]["containers"][0]["env"]:
            assert not is_secret(variable["name"]) or "secretKeyRef" in variable["valueFrom"]
