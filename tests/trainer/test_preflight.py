"""Every command that starts Ray first refuses what this machine or the model cannot do; a job that is sent is judged there."""

import json
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlframe.config import ModelConfig
from rlframe.models import resolve_model
from tests.support.tiny_models import write
from trainer.cli import main
from trainer.settings.compose import compose, to_yaml
from trainer.settings.config import Config

COMMANDS = ["train", "train --dry-run", "resume", "serve"]
UNTRAINED = "model.build.warmup_steps=0"
HERE = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Run a command with overrides; the line that it refuses them with, before Ray starts."""
    ray = pytest.importorskip("ray")

    def started(*args, **options):
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray, "init", started)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def run(command: str, *overrides: str) -> str:
        run_dir = tmp_path / "run"
        if command == "resume":
            run_dir.mkdir(exist_ok=True)
            (run_dir / "config.yaml").write_text(to_yaml(compose([UNTRAINED])))
            argv = ["resume", str(run_dir), *overrides]
        else:
            argv = [*command.split(), UNTRAINED, f"run_dir={run_dir}", *overrides]
        assert main.main(argv) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("rlframe: ") and captured.err.count("\n") == 1, captured.err
        return captured.err

    return run


@HERE
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("rollout.engine_args={enforce_eagre: true}", "enforce_eagre is not an argument of rollout.engine=vllm"),
        ("rollout.engine_args={enforce_eager: 1}", "rollout.engine_args.enforce_eager=1 is of another type"),
        ("rollout.max_model_len=100000", "rollout.max_model_len=100000 is more than the 512 tokens"),
        ("seed=4294967296", "seed=4294967296 is out of range"),
    ],
    ids=["unknown argument", "type of an argument", "context", "seed"],
)
def test_settings_that_the_engine_or_the_model_cannot_take(refused, command, override, sentence):
    assert sentence in refused(command, override)


@HERE
@pytest.mark.parametrize("command", COMMANDS)
def test_a_temporary_folder_whose_name_is_too_long(refused, command, monkeypatch):
    with tempfile.TemporaryDirectory(prefix="f", dir="/tmp") as short:
        long = Path(short) / ("x" * 100)
        long.mkdir()
        monkeypatch.setenv("RAY_TMPDIR", str(long))
        assert f"RAY_TMPDIR={long} is {len(str(long))} bytes long" in refused(command)


@pytest.mark.parametrize("command", ["train", "train --dry-run", "serve"])
def test_a_run_directory_that_is_a_file(refused, command, tmp_path):
    (tmp_path / "file").touch()
    assert f"run_dir={tmp_path}/file is a file" in refused(command, f"run_dir={tmp_path}/file")
    assert f"run_dir={tmp_path}/file/run lies below {tmp_path}/file" in refused(command, f"run_dir={tmp_path}/file/run")


def test_a_run_to_resume_that_is_a_file(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main.main(["resume", str(tmp_path / "file")]) == 2
    assert f"run_dir={tmp_path}/file is a file" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_engine(refused, command, monkeypatch):
    monkeypatch.setattr("workers.engines.checks.find_spec", lambda name: None)
    assert "rollout.engine=vllm needs the package vllm" in refused(command)


def test_a_scaled_context_is_served_as_far_as_it_reaches(tmp_path):
    """Positions of 512, stretched by two: a server that counted positions alone would refuse half of them."""
    from trainer.server.serve import Base

    shutil.copytree(resolve_model(ModelConfig(name="tiny", builder="tiny", build={"warmup_steps": 0})), tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    settings["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings))
    config = compose([f"model.path={tmp_path / 'model'}", "rollout=torch", "rollout.max_model_len=1024"])
    assert Base.read(config).context == 1024


def test_a_server_ends_samples_where_a_run_does(tmp_path):
    """Ends that only the folder's generation settings name, and those of ``task.stop``."""
    from trainer.server.serve import Base

    folder = tmp_path / "model"
    shutil.copytree(resolve_model(ModelConfig(name="tiny", builder="tiny", build={"warmup_steps": 0})), folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    task = ["task=jsonl", "task.train=x.jsonl", "task.reward=x:y", "task.stop=[9]"]
    base = Base.read(compose([f"model.path={folder}", "rollout=torch", "rollout.max_model_len=256", *task]))
    assert base.eos == (base.tokenizer.eos_token_id, 7, 8, 9)


@pytest.mark.parametrize("command", ["train", "train --dry-run", "serve"])
def test_a_model_that_ranks_cannot_share(refused, command, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(resolve_model(ModelConfig(name="tiny", builder="tiny", build={"warmup_steps": 0})), folder)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    write("ctrl", str(folder), dff=40, n_layer=2, n_head=4, n_embd=32, n_positions=1024)
    capsys.readouterr()  # the progress of writing it
    line = refused(command, f"model.path={folder}", "model.name=ctrl", "model.builder=null", "rollout=torch")
    assert "CTRLLMHeadModel does not say which of its modules are blocks" in line


def test_a_job_that_is_sent_is_not_judged_by_the_machine_that_sends_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/" + "x" * 100)
    monkeypatch.setattr("workers.engines.checks.find_spec", lambda name: None)
    argv = ["submit", "--dry-run", f"run_dir={tmp_path}/file/run", "rollout.max_model_len=100000"]
    assert main.main(argv) == 0
    assert main.main(["submit", "--dry-run", "run_dir=/shared/run", "seed=4294967296"]) == 2
    assert "seed=4294967296 is out of range" in capsys.readouterr().err


def test_a_tilde_is_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compose(["run_dir=~/runs/a"]).run_dir == f"{tmp_path}/runs/a"
    assert Config(name="b", run_dir="~/${name}").run_dir == f"{tmp_path}/b"
    assert Config(run_dir="/a/~/b").run_dir == "/a/~/b" and os.path.expanduser("~") == str(tmp_path)
