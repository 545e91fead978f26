"""Overrides become one Config; what a user mistypes is answered in one sentence."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import trainer.settings.compose as compose_module
from rlframe.config import ConfigError
from trainer.settings.compose import compose, load_yaml, options, to_yaml
from trainer.settings.config import Config
from trainer.settings.presets import configs_dir
from workers.environments.task_checks import eval_size


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_embedded_default_needs_no_override():
    config = compose()
    assert isinstance(config, Config)
    assert (config.model.name, config.task.name, config.rollout.engine) == ("tiny", "arithmetic", "vllm")
    assert config.algorithm.score_centering and config.algorithm.rollout_is == "token"
    assert config.cluster.address is None
    assert config.actor.mode == config.critic.mode == "lora", "both on one base"


def test_composing_leaves_the_process_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compose(["algorithm=sao"])
    assert Path.cwd() == tmp_path and not list(tmp_path.iterdir())
    compose()  # no global state of Hydra is left behind


def test_settings_are_overridden_in_the_grammar_of_hydra():
    config = compose(
        [
            "actor.optim.lr=1e-4",
            "critic.clip_range=0.2",
            "critic.optim.max_grad_norm=null",
            "actor.frozen_patterns=[attn,embed]",
            "task.chat_template=true",
            "rollout.engine_args.max_num_batched_tokens=7",
            "model.build={a: 1}",
            "run_dir=/elsewhere/${name}",
        ]
    )
    assert config.actor.optim.lr == 1e-4
    assert config.critic.clip_range == 0.2
    assert config.critic.optim.max_grad_norm is None
    assert config.actor.frozen_patterns == ["attn", "embed"]
    assert config.task.chat_template is True
    assert config.rollout.engine_args == {"max_num_batched_tokens": 7}
    assert config.model.build["a"] == 1
    assert config.run_dir == "/elsewhere/run"


@pytest.mark.parametrize(("text", "value"), [("[0.5,5.0]", [0.5, 5.0]), ("[0, 3]", [0, 3]), ("3", 3)])
def test_a_band_is_a_list(text, value, capsys):
    given = ["algorithm=bypass_pg_token_tis", f"algorithm.rollout_is_threshold={text}"]
    assert compose(given).algorithm.rollout_is_threshold == value
    assert capsys.readouterr().err == ""


def test_the_run_directory_follows_the_name():
    assert compose(["name=abc"]).run_dir == "runs/abc"


def test_a_model_brings_its_own_settings_and_the_command_line_wins():
    smollm2 = compose(["model=smollm2"])
    assert smollm2.actor.mode == "lora"
    assert compose(["actor=full", "model=smollm2"]).actor.mode == "full"
    assert compose(["actor.optim.lr=0.5", "model=smollm2"]).actor.optim.lr == 0.5


def test_a_model_path_alone_is_enough():
    config = compose(["model.path=/somewhere/a_model"])
    assert config.model.builder is None and config.model.path == "/somewhere/a_model"
    assert config.actor.mode == "lora"  # not what suits the tiny model


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("algorithm.scor_centering=true", "algorithm.scor_centering is not a setting; did you mean algorithm.score_centering?"),
        ("score_centering=true", "did you mean algorithm.score_centering?"),
        ("actor.optim.learning_rate=1", "did you mean"),
        ("lr=1", "lr is not a setting; did you mean actor.optim.lr?"),
        ("batchsize=4", "did you mean batch_size?"),
        ("algoritm=sao", "did you mean algorithm?"),
        ("algorithm=saoo", "algorithm=saoo is not an option; did you mean algorithm=sao?"),
        ("algorithm=bypass_pg_token_tis_cs", "did you mean algorithm=bypass_pg_token_tis_sc?"),
        ("model=smolm2", "did you mean model=smollm2?"),
        ("rollout=sglamg", "rollout=sglamg is not an option"),
        ("xyzzy=1", "xyzzy is not a setting; there are name, run_dir, seed"),
        ("steps.more=1", "steps.more is not a setting; steps is a single value."),
        ("hydra.run.dir=x", "hydra.run.dir is not a setting"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_right_one(override, hint):
    assert hint in refusal(override)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("actor.optim.lr=abc", "actor.optim.lr is 'abc', but it must be a number."),
        ("steps=1.5", "steps is 1.5, but it must be a whole number."),
        ("batch_size=null", "batch_size is None, but it must be a whole number."),
        ("log.console=maybe", "log.console is 'maybe', but it must be true or false."),
        ("critic.clip_range=wide", "critic.clip_range is 'wide', but it must be a number or null."),
        ("actor.optim.betas=0.9", "actor.optim.betas is 0.9, but it must be a list, [a number, ...]."),
        ("actor.optim=3", "actor.optim is 3, but it must be a section; set its parts, such as actor.optim.lr."),
        ("batch_size=1,2", "batch_size takes one value; write a list as batch_size=[a,b]."),
        ("run_dir=${nam}", "A value refers to something that is not a setting: Interpolation key 'nam' not found."),
    ],
)
def test_a_wrong_type_names_the_key_the_value_and_what_is_wanted(override, sentence):
    assert refusal(override) == sentence


@pytest.mark.parametrize(
    "text", ["steps", "=3", "steps==", "~steps", "algorithm@here=sao", "algorithm=null", "algorithm/x=sao", ""]
)
def test_what_is_no_override_is_refused_in_one_sentence(text):
    assert refusal(text).endswith((".", "?"))


def test_a_setting_without_effect_is_refused_when_it_is_typed_but_not_when_a_preset_has_it():
    compose(["algorithm=grpo", "batch_size=32"])
    message = refusal("algorithm=grpo", "batch_size=32", "critic.ensemble=3")
    assert message == ("critic.ensemble has no effect with algorithm.advantage=group, which has no critic; leave it out.")
    assert "algorithm.clip_low has no effect" in refusal("algorithm=bypass_pg", "algorithm.clip_low=0.3")
    assert "task.tools_key has no effect with task.name=wordle" in refusal("task=wordle", "task.tools_key=null")
    assert "without task.chat_template=true" in refusal("task=wordle", "task.template_args.enable_thinking=false")
    assert "task.stop has no effect with task.name=arithmetic" in refusal("task.stop=[5]")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("scor_centering: true", "algorithm.scor_centering is not a setting; did you mean algorithm.score_centering?"),
        ("gamma: much", "algorithm.gamma must be a number"),
        ("gamma: [", "is not YAML"),
        ("policy_loss: dis\nrollout_is: token", "algorithm.rollout_is=token would apply the ratio twice"),
    ],
)
def test_a_fault_in_a_preset_of_the_users_own_is_one_sentence(tmp_path, monkeypatch, text, hint):
    shutil.copytree(configs_dir(), tmp_path / "configs")
    (tmp_path / "configs" / "algorithm" / "mine.yaml").write_text(text)
    monkeypatch.setattr(compose_module, "configs_dir", lambda: tmp_path / "configs")
    assert hint in refusal("algorithm=mine")


def test_stops_are_a_list_of_texts_and_numbers(tmp_path):
    assert "task.stop is 5, but it must be a list" in refusal("task=countdown", "task.stop=5")
    config = compose(["task=countdown", 'task.stop=["<|im_end|>","7",7,"\\n"]'])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_yaml(tmp_path / "config.yaml").task.stop == config.task.stop
    assert config.task.stop[:3] == ["<|im_end|>", "7", 7]


def test_the_number_of_held_out_problems_is_all_of_a_file_of_them_unless_it_is_given():
    files = ["task=jsonl", "task.train=a", "task.reward=b:c"]
    assert eval_size(compose()) == eval_size(compose(files)) == 256
    assert eval_size(compose([*files, "task.eval=d"])) is None
    assert eval_size(compose([*files, "task.eval=d", "eval.size=7"])) == eval_size(compose(["eval.size=7"])) == 7


def test_the_yaml_of_a_run_gives_the_same_config_back(tmp_path):
    config = compose(
        ["algorithm=sao", "algorithm.rollout_rs=token_k1", "algorithm.rollout_rs_threshold=0.5_5", "task.options={low: 1}"]
    )
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load_yaml(path) == config


def test_a_resumed_run_may_change_single_settings_but_no_group(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(compose()))
    changed = load_yaml(path, ["steps=7", "rollout.engine_args.a=1"])
    assert changed.steps == 7 and changed.rollout.engine_args == {"a": 1}
    for override, hint in (
        ("algorithm=sao", "was chosen when the run began"),
        ("stepz=1", "did you mean steps?"),
        ("steps=x", "whole"),
    ):
        with pytest.raises(ConfigError, match=hint.replace("?", r"\?")):
            load_yaml(path, [override])


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("steps: [", "cannot be read"),
        ("stepz: 3", "did you mean steps?"),
        ("steps: many", "steps"),
        ("- 1", "not a mapping"),
    ],
)
def test_a_damaged_config_file_is_one_sentence(tmp_path, text, hint):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_yaml(path)
    assert hint in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_config_file_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_yaml(tmp_path / "none.yaml")


def test_the_groups_have_the_options_that_the_documentation_names():
    groups = options()
    assert set(groups) == {"model", "task", "algorithm", "rollout", "actor", "critic", "cluster"}
    assert {"tiny", "smollm2", "local"} <= set(groups["model"])
    assert {"arithmetic", "countdown", "jsonl", "parquet"} <= set(groups["task"])


@pytest.mark.slow
def test_an_installed_wheel_carries_its_configs(tmp_path):
    root = configs_dir().parent
    if not (root / "pyproject.toml").exists():
        pytest.skip("needs a checkout")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=root, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    assert {file.suffix for file in (site / "trainer" / "watch" / "page").iterdir()} == {".html", ".css", ".js"}
    (site / "configs").mkdir()  # a stranger's folder of that name beside the packages must not be taken
    code = (
        "import rlframe; from trainer.settings.compose import compose;"
        "print(rlframe.__file__, compose(['algorithm=sao']).algorithm.policy_loss)"
    )
    # -P: the current directory is not on the path; PYTHONPATH comes before the editable checkout.
    out = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert out == [str(site / "rlframe" / "__init__.py"), "dis"]


def test_an_advantage_of_ones_own_is_tried_where_settings_are_read(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "composed_advantages.py").write_text(
        "from rlframe.advantages import Estimator\n"
        "class Own(Estimator):\n"
        "    settings = ('gamma',)\n"
        "    def __init__(self, algorithm, scale): ...\n"
        "    def __call__(self, batch): ...\n"
    )
    own, scale = "algorithm.advantage=composed_advantages:Own", "algorithm.advantage_args.scale=2"
    assert compose([own, scale, "algorithm.gamma=0.5"]).algorithm.advantage_args == {"scale": 2}
    assert refusal(own).startswith("algorithm.advantage=composed_advantages:Own cannot be built")
    assert refusal("algorithm.advantage=absent:Own").startswith("algorithm.advantage=absent:Own cannot be imported")
    without = "has no effect with algorithm.advantage=composed_advantages:Own"
    assert f"critic.ensemble {without}, which has no critic" in refusal(own, scale, "critic.ensemble=2")
    assert f"algorithm.lambda_critic {without};" in refusal(own, scale, "algorithm.lambda_critic=1")
    message = refusal(own, scale, "algorithm.normalize_advantages=true")
    assert message.endswith("set algorithm.normalize_advantages=false or algorithm.advantage=group.")


@pytest.mark.parametrize("value", ["true", "false"])
def test_a_setting_that_is_gone_is_refused_on_the_command_line_and_read_over_in_saved_runs(tmp_path, value):
    assert refusal(f"critic.per_env={value}") == (
        "critic.per_env is gone, since a run has one environment, and its critic is that environment's already; leave it out."
    )
    text = to_yaml(compose())
    assert "\ncritic:\n" in text
    (tmp_path / "config.yaml").write_text(text.replace("\ncritic:\n", f"\ncritic:\n  per_env: {value}\n"))
    assert load_yaml(tmp_path / "config.yaml") == compose()


def test_a_policy_loss_of_the_users_own_is_tried_when_the_job_is_composed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    text = """
class Mine:
    def __init__(self, factor=1.0):
        self.factor = factor
    def __call__(self, logprobs, sampler_logprobs, advantages):
        return -self.factor * advantages * logprobs
class Mean(Mine):
    def __call__(self, *tensors):
        return super().__call__(*tensors).mean()
"""
    (tmp_path / "composed_loss.py").write_text(text)
    plain, mine = ["algorithm=bypass_pg", "algorithm.loss_args.factor=2"], "algorithm.policy_loss=composed_loss:Mine"
    config = compose([*plain, mine])
    assert config.algorithm.loss_args == {"factor": 2}
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_yaml(tmp_path / "config.yaml") == config
    assert "must be (6,)" in refusal(*plain, "algorithm.policy_loss=composed_loss:Mean")
    assert "algorithm.clip_low has no effect" in refusal(*plain, mine, "algorithm.clip_low=0.1")
    assert "algorithm.loss_args has factor" in refusal(*plain)
