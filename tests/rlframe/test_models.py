"""Model folders: built once, found again, and what the tiny model was taught."""

import threading

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlframe.config import ConfigError, ModelConfig
from rlframe.models import resolve_model
from rlframe.models.arithmetic import ArithmeticOptions, arithmetic_problems

UNTRAINED = ModelConfig(name="tiny", builder="tiny", build={"warmup_steps": 0})


def test_a_model_is_built_once_and_loads_with_plain_transformers(tmp_path):
    folder = resolve_model(UNTRAINED, tmp_path)
    assert resolve_model(UNTRAINED, tmp_path) == folder
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen3" and sum(p.numel() for p in model.parameters()) < 1_000_000
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("1+2+3+4=").input_ids) == "1+2+3+4="


def test_other_arguments_are_another_model(tmp_path):
    other = ModelConfig(name="tiny", builder="tiny", build={"warmup_steps": 0, "seed": 1})
    assert resolve_model(UNTRAINED, tmp_path) != resolve_model(other, tmp_path)


def test_two_processes_that_race_get_the_same_folder(tmp_path):
    found = []
    threads = [threading.Thread(target=lambda: found.append(resolve_model(UNTRAINED, tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert [path.name for path in (tmp_path / "models").iterdir()] == [found[0].rsplit("/", 1)[1]]


def test_a_failing_build_leaves_nothing_behind(tmp_path):
    with pytest.raises(ConfigError, match="no argument 'warmup'"):
        resolve_model(ModelConfig(name="tiny", builder="tiny", build={"warmup": 1}), tmp_path)
    assert not list((tmp_path / "models").iterdir())


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (ModelConfig(builder="tin"), "did you mean tiny"),
        (ModelConfig(builder=None, path="/nowhere/at/all"), "is not a folder"),
        (ModelConfig(builder="tiny", path="/tmp"), "exactly one"),
    ],
)
def test_what_cannot_be_a_model_is_refused_in_one_sentence(model, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        resolve_model(model, tmp_path)


def test_held_out_problems_are_never_training_problems():
    train, held_out = arithmetic_problems(ArithmeticOptions())
    assert not {p.text for p in train} & {p.text for p in held_out}
    assert len(train) + len(held_out) == 7**4 and len(held_out) >= 256
    for problem in (*train, *held_out):
        assert sum(map(int, problem.text.rstrip("=").split("+"))) == int(problem.answer)
