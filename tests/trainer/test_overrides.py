"""Values of the command line and of ``config.yaml`` by the type that the schema declares, and other names for settings."""

import dataclasses
import typing

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlframe.config import ConfigError
from trainer.settings.checks import check
from trainer.settings.compose import compose, load_yaml, options, resumed, to_yaml
from trainer.settings.config import Config
from trainer.settings.overrides import ALIASES, parse, unknown
from trainer.settings.overrides import settings as keys
from trainer.settings.redact import redact_text

LOOKS = [
    "2026_11_30", "1.10", "1e5", "true", "null", "0x10", "1_000", ".5", "-3", "nan", "2026-11-30", "yes", "None",
    "a=b", "~/runs", "a(b)", "[x", "x]", "{y}", "a#b", "two words", "a,b", "a, b", "$HOME", "$", "${", "}", "50%", "ä ß 日本",
    "a:b", "a: b", "!tag", "&x", "*x", "@x", "`x`", "it's", 'say "so"', "\\", "a\\", "\\${", "???", "-", "|", ">", "a\tb",
]  # fmt: skip
"""Texts that YAML, Hydra or OmegaConf would take for something else."""
TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1).filter(lambda text: text.strip())


@pytest.mark.parametrize("text", LOOKS)
@pytest.mark.parametrize("key", ["name", "run_dir", "task.train", "log.project", "rollout.weights_dir"])
def test_text_is_taken_as_it_stands(key, text):
    if text == "null" and key in ("task.train", "rollout.weights_dir"):
        assert parse(f"{key}={text}", options()).value is None
        return
    assert parse(f"{key}={text}", options()).value == text


@pytest.mark.parametrize("text", [text for text in LOOKS if text != "null"])
def test_a_path_or_a_name_arrives_in_the_job_as_it_was_typed(text):
    config = compose([f"name={text}", "task=jsonl", f"task.train={text}", "task.reward=math", "run_dir=/r"])
    assert (config.name, config.task.train, config.run_dir) == (text, text, "/r")


def test_the_name_of_a_job_is_never_a_number():
    assert [compose([f"name={name}"]).run_dir for name in ("2026_11_30", "1.10", "1e5", "true", "null")] == [
        "runs/2026_11_30", "runs/1.10", "runs/1e5", "runs/true", "runs/null"
    ]  # fmt: skip


def test_lists_of_texts_and_free_values_are_read_by_the_same_rule():
    config = compose(
        [
            "actor=lora",
            "actor.frozen_patterns=[1.10, 'a, b', layers.0(x)]",
            r"actor.lora.targets=.*\.(q|v)_proj",
            "task.options.path=/a(b)/c d",
            "rollout.engine_args={n: 3, x: 1e-5, flag: true}",
        ]
    )
    assert config.actor.frozen_patterns == ["1.10", "a, b", "layers.0(x)"]
    assert config.actor.lora.targets == r".*\.(q|v)_proj"
    assert config.task.options["path"] == "/a(b)/c d"
    assert config.rollout.engine_args == {"n": 3, "x": 1e-5, "flag": True}
    assert compose(["actor=lora", "actor.lora.targets=[q_proj,v_proj]"]).actor.lora.targets == ["q_proj", "v_proj"]


def test_quotes_around_the_whole_text_are_the_shells_and_the_rest_is_text():
    assert compose(["name='two words; no shell'"]).name == "two words; no shell"
    assert compose(["name='a' and 'b'"]).name == "'a' and 'b'"
    assert compose([r"name='it\'s'"]).name == "it's"
    assert compose(["name=${seed}", "run_dir=/x/${name}"]).run_dir == "/x/0"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("run_dir=", "run_dir= is empty; give it a value."),
        ("name=  ", "name= is empty; give it a value."),
        ("name=''", "name= is empty; give it a value."),
        ("task.train=", "task.train= is empty; give it a value (or null)."),
        ("task.options.path=", "task.options.path= is empty; give it a value, or '' for an empty text."),
        ("steps=", "steps is '', but it must be a whole number."),
        ("steps=a(b", "steps is 'a(b', but it must be a whole number."),
        ("name=a\0b", "name is not text: it has bytes that are not UTF-8, or a NUL."),
        ("name=a\udcff", "name is not text: it has bytes that are not UTF-8, or a NUL."),
        ("task={name: 1.10}", "task.name is text and 1.1 is a number; write task.name=... on its own, or quotes around it."),
        ("model=/data/a model", "model=/data/a model is not an option; for a folder write model.path=/data/a model."),
        ("algorithm=a(b", "algorithm=a(b is not an option; there are"),
    ],
)
def test_what_cannot_be_a_value_is_refused_with_what_is_wanted(override, sentence):
    with pytest.raises(ConfigError) as caught:
        compose([override])
    assert str(caught.value).startswith(sentence)


def test_a_configuration_made_in_python_has_its_own_run_directory():
    assert Config().run_dir == "runs/run" and Config(name="mine").run_dir == "runs/mine"
    assert Config(name="mine", run_dir="/x").run_dir == "/x"
    for empty in (Config(run_dir=""), Config(name=" ")):
        with pytest.raises(ConfigError, match=r"^(run_dir|name) is empty; give it a value\.$"):
            check(empty)


def text_settings(of=Config, prefix=""):
    for name, hint in typing.get_type_hints(of).items():
        if dataclasses.is_dataclass(hint):
            yield from text_settings(hint, f"{prefix}{name}.")
        elif hint in (str, typing.Optional[str]):
            yield prefix + name


def put(config, key, value):
    *sections, last = key.split(".")
    for section in sections:
        config = getattr(config, section)
    setattr(config, last, value)


@settings(max_examples=25, deadline=None)
@given(texts=st.dictionaries(st.sampled_from(sorted(text_settings())), TEXT | st.sampled_from(LOOKS), min_size=1), free=TEXT)
@example(texts=dict.fromkeys(text_settings(), "1e5"), free="1e5")
@example(texts=dict.fromkeys(text_settings(), "a\x85b\u2028c\r\n d"), free="\x85 \u2029\ufeff")
@example(texts=dict.fromkeys(text_settings(), "${name}"), free="${name}")
def test_what_is_written_to_a_run_directory_is_read_back_to_the_letter(tmp_path_factory, texts, free):
    config = Config()
    for key, text in texts.items():
        put(config, key, "a${b}" if text == "${name}" and key == "run_dir" else redact_text(text))
    free = redact_text(free)
    config.task.options, config.actor.lora.targets = {"x": free, "y": [free, 1e-5, 3, None, True]}, [free]
    config.actor.frozen_patterns, config.algorithm.rollout_rs_threshold = [free], free
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(to_yaml(config), "utf-8")
    assert load_yaml(path) == config


def test_in_a_file_too_text_is_text(tmp_path):
    (tmp_path / "config.yaml").write_text("name: 2026_11_30\nrun_dir: 1e5\nlog: {project: 1.10}\nactor: {optim: {lr: 1e-4}}\n")
    config = load_yaml(tmp_path / "config.yaml")
    assert (config.name, config.run_dir, config.log.project, config.actor.optim.lr) == ("2026_11_30", "1e5", "1.10", 1e-4)


def test_a_resumed_run_takes_no_setting_without_effect(tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(compose(["algorithm=grpo", "batch_size=32"])))
    for override, key in (("critic.ensemble=3", "critic.ensemble"), ("run_dir=/x", "run_dir")):
        with pytest.raises(ConfigError, match=f"^{key} has no effect"):
            resumed(tmp_path, [override])
    config = resumed(tmp_path, ["name=1.10", "steps=7"])
    assert (config.name, config.steps, config.run_dir) == ("1.10", 7, str(tmp_path))


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("actor.optim.learning_rate", "actor.optim.lr"),
        ("critic.optim.learning_rate", "critic.optim.lr"),
        ("learning_rate", "actor.optim.lr"),
        ("actor.lora.r", "actor.lora.rank"),
        ("critic.lora_r", "critic.lora.rank"),
        ("num_steps", "steps"),
        ("trainer.max_steps", "steps"),
        ("bs", "batch_size"),
        ("n_gpus", "actor.gpus"),
        ("rollout.max_tokens", "rollout.max_new_tokens"),
        ("rollout.n", "algorithm.rollouts_per_prompt"),
        ("output_dir", "run_dir"),
        ("model_name_or_path", "model.path"),
    ],
)
def test_a_common_name_is_answered_with_ours(typed, ours):
    assert unknown(typed, "a setting", typed, keys(), "") == f"{typed} is not a setting; did you mean {ours}?"


def test_every_other_name_leads_to_a_setting_and_is_none_itself():
    for name, ours in ALIASES.items():
        assert name not in keys() and any(f".{key}".endswith(f".{ours}") for key in keys()), name
