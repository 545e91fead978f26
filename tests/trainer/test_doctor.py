"""Each check of ``rlframe doctor`` against facts of healthy and of sick machines, and the command on this one."""

from importlib.metadata import PackageNotFoundError, version

import pytest

from trainer.cli import main
from trainer.cluster import doctor
from workers.engines.registry import engine_spec

GIB = 2**30


def test_python_must_be_new_enough():
    assert doctor.python((3, 11, 0)).todo is None
    assert doctor.python((3, 10, 14)).todo is not None
    assert doctor.python((4, 0)).todo is None


def test_a_missing_and_a_wrong_package_are_named_with_what_is_wanted():
    def installed(name):
        if name == "peft":
            raise PackageNotFoundError(name)
        return "1.0.0" if name == "torch" else version(name)

    finding = doctor.packages(installed)
    assert "peft is missing (wanted ==" in finding.text and "torch is 1.0.0 (wanted " in finding.text
    assert finding.todo and "make install" in finding.todo
    assert doctor.packages().todo is None


def test_ray_must_be_that_of_the_cluster():
    assert doctor.ray().todo is None
    assert doctor.ray(version("ray")).todo is None
    assert "==1.2.3" in (doctor.ray("1.2.3").todo or "")


def test_an_engine_that_is_missing_or_does_not_import_says_what_to_install(monkeypatch):
    assert doctor.engine("torch", run=lambda program: None).todo is None
    broken = doctor.engine("torch", run=lambda program: "ImportError: libfoo.so")
    assert broken.todo and "ImportError: libfoo.so" in broken.text
    monkeypatch.setattr(engine_spec("vllm"), "distributions", ("no-such-distribution",))
    assert "rlframe[train,vllm" in (doctor.engine("vllm").todo or "")


def test_an_engine_that_is_optional_is_looked_at_only_where_it_is(monkeypatch):
    monkeypatch.setattr(doctor, "engine", lambda name, start: doctor.Finding(f"engine {name}", ""))
    monkeypatch.setattr(engine_spec("sglang"), "distributions", ("no-such-distribution",))
    names = [finding.name for finding in doctor.check_all(start=False)]
    assert {"engine torch", "engine vllm"} <= set(names) and "engine sglang" not in names
    monkeypatch.setattr(engine_spec("sglang"), "distributions", ("torch",))
    assert "engine sglang" in [finding.name for finding in doctor.check_all(start=False)]


def test_a_program_that_fails_gives_its_last_line():
    assert doctor._python("print('fine')") is None
    assert doctor._python("raise RuntimeError('no luck')") == "RuntimeError: no luck"


@pytest.mark.slow
def test_the_torch_engine_starts_and_samples_on_a_tiny_model(monkeypatch, tmp_path):
    monkeypatch.setenv("RLFRAME_CACHE", str(tmp_path))
    finding = doctor.engine("torch", start=True)
    assert (finding.todo, finding.text) == (None, f"torch {version('torch')} starts and samples")


def test_a_full_disk_and_a_small_shared_memory_are_to_be_enlarged(tmp_path):
    folder = str(tmp_path)
    assert doctor.disk(folder, lambda path: 3 * GIB).todo is None
    assert doctor.disk(folder, lambda path: GIB).todo is not None
    assert doctor.shared_memory(folder, lambda path: 2 * GIB).todo is None
    assert "--shm-size" in (doctor.shared_memory(folder, lambda path: 64 * 2**20).todo or "")
    assert doctor.shared_memory(f"{folder}/none").todo is None


def test_gpus_that_torch_does_not_see_are_a_problem_and_no_gpu_is_none():
    assert doctor.gpus([], False, None).todo is None
    assert doctor.gpus(["H200", "H200"], True, "13.0").text == "2 (H200)"
    assert "rlframe[train,vllm]" in (doctor.gpus([], True, None).todo or "")
    assert "nvidia-smi" in (doctor.gpus([], True, "13.0").todo or "")


def test_a_variable_that_sends_runs_to_a_dashboard_is_named():
    assert doctor.variables({}).todo is None
    assert doctor.variables({"RAY_ADDRESS": "10.0.0.1:6379"}).todo is None
    assert "unset RAY_ADDRESS" in (doctor.variables({"RAY_ADDRESS": "http://head:8265"}).todo or "")


@pytest.mark.parametrize(("todo", "code"), [(None, 0), ("buy a disk", 1)])
def test_the_exit_code_says_whether_there_is_something_to_do(todo, code, monkeypatch, capsys):
    findings = [doctor.Finding("Python", "3.11.9"), doctor.Finding("disk", "full", todo)]
    monkeypatch.setattr(doctor, "check_all", lambda start, cluster: iter(findings))
    assert main.main(["doctor"]) == code
    out = capsys.readouterr().out
    assert out.startswith("ok    Python: 3.11.9\n")
    assert ("TODO  disk: full\n      -> buy a disk\n" in out) == bool(todo)
