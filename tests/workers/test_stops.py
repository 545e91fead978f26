"""Which tokens end an answer: every one that the tokenizer, the model's files, the chat template or the user names."""

import asyncio
import json

import numpy as np
import pytest
import torch

from rlframe.config import ConfigError
from rlframe.models.characters import character_tokenizer
from rlframe.types import Prompt
from tests.support.chatml import END, END_OF_TEXT, START, chatml_tokenizer
from tests.support.engines import save, tiny_model
from workers.engines.protocol import SamplingParams
from workers.engines.torch.engine import TorchEngine
from workers.environments.registry import make_environment
from workers.environments.settings import TaskConfig
from workers.environments.stops import end_of_turn, response, stop_token_ids
from workers.rollout.episode import run_episode

ENVIRONMENTS = [
    {"name": "jsonl", "train": "prompts.jsonl", "reward": "module:function"},
    {"name": "countdown"},
    {"name": "wordle", "chat_template": True},
]


@pytest.mark.parametrize("task", ENVIRONMENTS, ids=lambda task: task["name"])
def test_a_chatml_answer_ends_at_the_end_of_its_turn_whatever_the_tokenizer_calls_the_end(task):
    tokenizer = chatml_tokenizer()
    assert tokenizer.eos_token_id == END_OF_TEXT
    environment = make_environment(TaskConfig(**task), tokenizer, seed=0, eval_size=1)
    assert environment.stop_token_ids == (END_OF_TEXT, END)
    environment = make_environment(TaskConfig(**task, stop=["z", START]), tokenizer, seed=0, eval_size=1)
    assert environment.stop_token_ids == (END_OF_TEXT, END, tokenizer.convert_tokens_to_ids("z"), START)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n<|im_end|>{% endfor %}", END),
        (
            "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}",
            END_OF_TEXT,
        ),
        ("{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}", None),
        ("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}", None),
        ("{{ raise_exception('system first') }}", None),
        (None, None),
    ],
)
def test_the_end_of_a_turn_is_the_first_special_token_behind_what_was_said(template, expected):
    assert end_of_turn(chatml_tokenizer(template), {}) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config.json": {"eos_token_id": 7}}, (END_OF_TEXT, 7)),
        ({"config.json": {"eos_token_id": [7, END_OF_TEXT, 8]}}, (END_OF_TEXT, 7, 8)),
        ({"config.json": {"eos_token_id": None, "text_config": {"eos_token_id": 9}}}, (END_OF_TEXT, 9)),
        ({"generation_config.json": {"eos_token_id": [5]}, "config.json": {"eos_token_id": 6}}, (END_OF_TEXT, 5, 6)),
        ({"generation_config.json": {"eos_token_id": [True, "x", 10**6, -1]}, "config.json": {}}, (END_OF_TEXT,)),
        ({"config.json": "not JSON"}, (END_OF_TEXT,)),
    ],
)
def test_the_model_s_files_name_ends_of_sequences(tmp_path, files, expected):
    tokenizer = chatml_tokenizer(template=None)
    tokenizer.name_or_path = str(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert stop_token_ids(tokenizer) == expected


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        ("</answer>", r"task\.stop has '</answer>', which is 9 tokens of this tokenizer"),
        ("é", r"task\.stop has 'é', which is no token"),
        (10**6, r"task\.stop has 1000000, but the tokenizer has the tokens 0 to 98"),
    ],
)
def test_a_stop_that_is_not_one_token_is_one_sentence(item, sentence):
    with pytest.raises(ConfigError, match=sentence):
        stop_token_ids(chatml_tokenizer(), [item])


def test_the_stop_is_no_part_of_the_response_unless_the_budget_cut_there():
    tokenizer = chatml_tokenizer()
    newline = tokenizer.convert_tokens_to_ids("\n")
    action = np.array([*tokenizer("4\n2").input_ids, newline], np.int32)
    assert response(tokenizer, action, "stop", (END, newline)) == "4\n2"
    assert response(tokenizer, action, "length", (END, newline)) == "4\n2\n"
    assert response(tokenizer, action[:0], "stop", (END,)) == ""


@pytest.mark.parametrize("place", [0, 3])
def test_an_episode_ends_with_stop_at_any_of_its_stops_and_with_length_without(tmp_path, place):
    """Greedy answers of plain transformers say where a stop must end the episode."""
    model, tokenizer = tiny_model(), character_tokenizer()
    engine = TorchEngine(save(model, tmp_path), max_model_len=64)
    start = np.array([5, 9, 12], np.int32)
    with torch.no_grad():
        whole = model.generate(torch.tensor(start)[None].long(), max_new_tokens=8, do_sample=False, eos_token_id=None)[
            0, 3:
        ].tolist()
    stop = whole[place]
    env = make_environment(TaskConfig(name="countdown", stop=[stop]), tokenizer, seed=0, eval_size=1)
    params = SamplingParams(max_new_tokens=8, temperature=0)
    prompt = Prompt("p", 0, start, "countdown", {"numbers": [1, 2, 3], "target": 6})
    ended = asyncio.run(run_episode(engine, env, prompt, params, max_model_len=64))
    assert ended.tokens[3:].tolist() == whole[: whole.index(stop) + 1] and ended.finish == "stop"
    env.stop_token_ids = (START,)
    assert START not in whole
    assert asyncio.run(run_episode(engine, env, prompt, params, max_model_len=64)).finish == "length"


@pytest.mark.parametrize("before", ["", "\n"], ids=["at once", "on a line of its own"])
def test_a_reply_ends_the_policy_s_turn_exactly_once(before):
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message.content + '<|im_end|>", f"message.content + '{before}<|im_end|>"
    )
    task = TaskConfig(name="countdown", chat_template=True, options={"attempts": 2})
    env = make_environment(task, tokenizer, seed=0, eval_size=1)
    said = np.array([*tokenizer("1+1").input_ids, END], np.int32)
    for action in (said, said[:-1]):
        text = tokenizer.decode([*action, *env.replies("wrong", action)])
        closed = "1+1" if action is said else f"1+1{before}"
        assert text == f"{closed}<|im_end|>\n<|im_start|>user\nwrong{before}<|im_end|>\n<|im_start|>assistant\n"
