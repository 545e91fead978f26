"""The command line: instant help, one line for a refused setting, and a dry run that starts nothing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlframe.config import ModelConfig
from rlframe.models import resolve_model
from trainer.cli import main
from trainer.settings.compose import load_yaml

UNTRAINED = "model.build.warmup_steps=0"


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main.main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_and_presets_import_nothing_heavy():
    code = (
        "import sys; from trainer.cli import main; main.main(['presets']);"
        "heavy = {'torch', 'ray', 'hydra', 'transformers', 'vllm'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_presets_lists_them_with_one_line_each(capsys):
    code, out, _ = run(capsys, "presets")
    assert code == 0
    assert any(line.startswith("sao ") and "DIS" in line for line in out.splitlines())


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["train", "algorithm=saoo"], "rlframe: algorithm=saoo is not an option; did you mean algorithm=sao?"),
        (["train", "--dry-run", "steps=0"], "rlframe: steps=0 is out of range; it must be at least 1."),
        (["train", "model.path=/no/such/folder", "--dry-run"], "rlframe: model.path=/no/such/folder is not a folder"),
        (["resume", "/no/such/run"], "rlframe: /no/such/run is not a run directory"),
    ],
)
def test_a_refused_setting_is_one_line_on_stderr_and_exit_code_2(capsys, argv, sentence):
    code, out, err = run(capsys, *argv)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(sentence)


def test_an_unknown_option_or_command_is_refused_by_the_parser(capsys):
    for argv in (["train", "--dryrun"], ["trian"], ["presets", "sao"]):
        with pytest.raises(SystemExit) as caught:
            main.main(argv)
        assert caught.value.code == 2


@pytest.mark.slow
def test_a_refusal_after_a_model_was_built_is_one_line_too(tmp_path):
    """In a process of its own: what libraries print belongs to the answer."""
    command = [sys.executable, "-m", "trainer.cli.main", "train", "--dry-run", UNTRAINED, "task.options={lowest: 1}"]
    ended = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "RLFRAME_CACHE": str(tmp_path)}, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert ended.stderr.startswith("rlframe: task.options.lowest is not an option")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("actor.lora.targets=[q_proj,k_porj]", "lora.targets has 'k_porj', which no module of this model is called."),
        ("actor.frozen_patterns=[self_atn]", "frozen_patterns has 'self_atn', but no parameter of the session"),
        ("critic.frozen_patterns=[self_atn]", "frozen_patterns has 'self_atn', but no parameter of the session"),
    ],
)
def test_sessions_that_the_model_cannot_have_are_refused_before_anything_starts(capsys, option, message):
    code, out, err = run(capsys, "train", "--dry-run", UNTRAINED, "actor=lora", option)
    assert (code, out) == (2, "") and message in err and err.strip().count("\n") == 0


def test_a_quantised_model_is_refused_before_anything_starts(capsys, tmp_path):
    folder = Path(resolve_model(ModelConfig(builder="tiny", build={"warmup_steps": 0})))
    shutil.copytree(folder, tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings))
    code, out, err = run(capsys, "train", "--dry-run", f"model.path={tmp_path / 'model'}")
    assert (code, out) == (2, "") and "holds a quantised model" in err


def test_a_dry_run_shows_configuration_placement_and_memory_and_starts_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLFRAME_CACHE", str(tmp_path / "cache"))
    code, out, _ = run(capsys, "train", "algorithm=sao", "--dry-run", UNTRAINED, "steps=17", "actor=full")
    assert code == 0
    configuration, placement, memory = (part.partition("\n")[2] for part in ("\n" + out).split("\n# ")[1:])
    (tmp_path / "shown.yaml").write_text(configuration)
    config = load_yaml(tmp_path / "shown.yaml")
    assert (config.steps, config.algorithm.policy_loss) == (17, "dis")
    assert "1 x learner" in placement and "1 x rollout" in placement
    assert "backbone 0" in placement and "critic_0" in placement
    assert "critic: adapters on " in out and "actor: adapters" not in out  # actor=full trains all weights
    assert "all processes together" in memory
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "shown.yaml"}
    ray = sys.modules.get("ray")
    assert ray is None or not ray.is_initialized()
