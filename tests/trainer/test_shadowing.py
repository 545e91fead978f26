"""A folder of the user with a package called like one of ours: every way to start something from there is refused."""

import os
import subprocess
import sys

import pytest

from trainer.cli import main
from workers.process import refuse_shadowing

FOREIGN = ["trainer/__init__.py", "workers/__init__.py", "rlframe/__init__.py", "workers.py", "rlframe.py", "trainer.py"]


@pytest.fixture
def folder(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / request.param
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    return tmp_path


@pytest.mark.parametrize("folder", FOREIGN, indirect=True)
@pytest.mark.parametrize(
    "command",
    [
        ["train", "model.build.warmup_steps=0"],
        ["train", "--dry-run", "model.build.warmup_steps=0"],
        ["serve"],
        ["submit", "run_dir=/shared/a"],
        ["submit", "--resume", "/shared/a"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_it_is_refused_with_the_file_that_is_in_the_way(folder, command, capsys, request):
    foreign = folder / request.node.callspec.params["folder"]
    assert main.main(command) == 2
    assert capsys.readouterr().err == (
        f"rlframe: {foreign} has the name of a package of rlframe, and Ray's processes would import it instead; rename it, or "
        "start from another folder.\n"
    )


@pytest.mark.parametrize("folder", ["trainer/__init__.py"], indirect=True)
def test_the_folder_that_is_sent_counts_not_the_one_that_it_is_sent_from(folder, tmp_path_factory, capsys):
    other = tmp_path_factory.mktemp("other")
    assert main.main(["submit", "--dry-run", "run_dir=/shared/a", "--working-dir", str(other)]) == 0
    assert main.main(["submit", "--dry-run", "run_dir=/shared/a", "--working-dir", ""]) == 0
    os.chdir(other)
    assert main.main(["submit", "--dry-run", "run_dir=/shared/a", "--working-dir", str(folder)]) == 2


def test_a_folder_of_data_with_such_a_name_is_in_nobodys_way(tmp_path):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "notes.txt").write_text("")
    (tmp_path / "workers.txt").write_text("")
    refuse_shadowing(str(tmp_path))


def test_our_own_checkout_is_not_foreign():
    import rlframe

    refuse_shadowing(os.path.dirname(os.path.dirname(os.path.abspath(rlframe.__file__))))


WHAT_RAY_DOES = """
import ray
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
@ray.remote
def where():
    import workers
    return workers.__file__
print(ray.get(where.remote()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["workers/__init__.py"], indirect=True)
def test_ray_would_indeed_import_the_users_package(folder, tmp_path_factory):
    """Why it is refused: if this fails, Ray has changed, and the refusal can go."""
    script = tmp_path_factory.mktemp("script") / "script.py"
    script.write_text(WHAT_RAY_DOES)
    done = subprocess.run([sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=800, check=True)
    assert done.stdout.strip().endswith(str(folder / "workers" / "__init__.py"))
