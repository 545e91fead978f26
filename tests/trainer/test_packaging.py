"""What is pinned, what is declared, and what the make targets promise agree."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins(*files: str) -> dict[str, str]:
    found = {}
    for file in files:
        for line in (ROOT / "requirements" / file).read_text().splitlines():
            if line and not line.startswith("#"):
                requirement = Requirement(line)
                assert re.fullmatch(r"==[\w.+]+", str(requirement.specifier)), f"{line} is not a pin"
                if requirement.marker is None or requirement.marker.evaluate({"platform_system": "Linux"}):
                    found[canonicalize_name(requirement.name)] = str(requirement.specifier).removeprefix("==")
    return found


def test_the_pins_satisfy_what_the_project_declares():
    extras = PROJECT["project"]["optional-dependencies"]
    pinned = pins("cpu.txt", "dev.txt", "reasoning-gym.txt")
    declared = [
        *PROJECT["build-system"]["requires"],
        *PROJECT["project"]["dependencies"],
        *(requirement for extra in ("train", "vllm-cpu", "math", "reasoning-gym", "dev") for requirement in extras[extra]),
    ]
    for requirement in map(Requirement, declared):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


def test_no_package_is_pinned_twice():
    runtime, dev = pins("cpu.txt"), pins("dev.txt")
    assert not set(runtime) & set(dev)


@pytest.mark.parametrize("target", ["quickstart", "test", "check", "lint", "smollm2"])
def test_a_target_on_a_fresh_clone_makes_its_own_environment(target, tmp_path):
    plan = subprocess.run(
        ["make", "-n", target, f"VENV={tmp_path}/venv"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "-m venv" in plan and "requirements/cpu.txt" in plan and "--editable ." in plan
    assert ("requirements/dev.txt" in plan) == (target in ("test", "check", "lint"))


def test_the_workflow_runs_ci_on_every_python_that_is_promised():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    job = workflow["jobs"]["ci"]
    promised = {
        version[1]
        for line in PROJECT["project"]["classifiers"]
        if (version := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line))
    }
    assert set(job["strategy"]["matrix"]["python"]) == promised
    assert min(promised, key=lambda v: int(v[2:])) == PROJECT["project"]["requires-python"].removeprefix(">=")
    step = job["steps"][-1]
    assert step["run"] == ".ci/run" and os.access(ROOT / ".ci" / "run", os.X_OK) and "TORCH_INDEX" in step["env"]
