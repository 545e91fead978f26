"""Tasks and rewards of other projects: reasoning-gym's problems by name, and mathematical equality by math-verify."""

import asyncio
import importlib.util
import json

import numpy as np
import pytest

from rlframe.config import ConfigError
from rlframe.models.characters import character_tokenizer
from rlframe.types import Prompt
from workers.environments.prompt_file import PromptFile
from workers.environments.registry import make_environment
from workers.environments.settings import TaskConfig
from workers.rewards.pool import RewardPool, check_reward

TOKENIZER = character_tokenizer()
needs_gym = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs the extra reasoning-gym")
needs_math = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs the extra math")


def gym(eval_size=4, **options):
    task = TaskConfig(name="reasoning_gym", options={"problems": 12, **options}, reward_timeout_s=60)
    return make_environment(task, TOKENIZER, seed=0, eval_size=eval_size)


def scores(env, problem, *responses):
    prompt = Prompt(problem.id, 0, problem.tokens, env.name, problem.payload)

    async def run():
        turns = [np.array([*TOKENIZER(text).input_ids, TOKENIZER.eos_token_id], np.int32) for text in responses]
        results = [await env.episode(prompt).step(turn, "stop") for turn in turns]
        env.close()
        return [result.reward for result in results]

    return asyncio.run(run())


@needs_gym
@pytest.mark.slow
def test_a_data_set_of_reasoning_gym_asks_and_scores():
    env = gym(dataset="chain_sum", config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, instruction="go")
    problem = env.train_prompts()[0]
    text = problem.payload["row"]["question"]
    assert TOKENIZER.decode(problem.tokens) == f"{text}\ngo".lower()
    a, operator, b = text.removesuffix(" =").split()[-3:]
    right = int(a) + int(b) if operator == "+" else int(a) - int(b)
    assert scores(env, problem, f"so <answer> {right} </answer>", str(right), str(right + 1)) == [1, 1, 0]
    held_out = {p.payload["row"]["question"] for p in env.eval_prompts()}
    assert len(held_out) == 4 and not held_out & {p.payload["row"]["question"] for p in env.train_prompts()}


@needs_gym
@pytest.mark.slow
def test_problems_are_the_same_in_every_process_also_where_the_library_orders_by_hash(monkeypatch):
    """word_ladder draws from a set of strings: another PYTHONHASHSEED gives other problems."""
    seen = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        seen.append([p.payload["row"]["question"] for p in gym(dataset="word_ladder").train_prompts()])
    assert seen[0] == seen[1] and len(set(seen[0])) > 1


@needs_gym
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dataset": "chain_smu"}, r"task\.options\.dataset=chain_smu .*did you mean chain_sum\?"),
        ({"dataset": "chain_sum", "config": {"minterms": 3}}, r"task\.options\.config does not fit .*chain_sum: .*minterms"),
        ({}, r"task\.options\.dataset is not set"),
        ({"data": "chain_sum"}, "did you mean dataset"),
    ],
)
def test_options_that_cannot_be_used_are_one_sentence(options, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        gym(**options).train_prompts()
    assert "\n" not in str(caught.value)


def test_missing_packages_are_one_sentence_with_the_command(monkeypatch):
    find = importlib.util.find_spec
    missing = ("reasoning_gym", "math_verify")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in missing else find(name, *rest))
    with pytest.raises(ConfigError, match=r"needs the package reasoning-gym: pip install 'rlframe\[reasoning-gym\]'"):
        gym(dataset="chain_sum")
    with pytest.raises(ConfigError, match=r"task\.reward=math needs the package math-verify: pip install 'rlframe\[math\]'"):
        check_reward(TaskConfig(name="jsonl", reward="math"))


@needs_math
@pytest.mark.slow
def test_answers_are_compared_as_mathematics():
    cases = [
        (r"so it is $\frac{1}{2}$", {"answer": "0.5"}, 1),
        (r"\boxed{2x+2}", {"answer": "2(x+1)"}, 1),
        ("The answer is 1,234.", {"answer": 1234}, 1),
        (r"first 3, then $x = 7$", {"answer": "$7$"}, 1),
        (r"\boxed{\{1,2\}}", {"reward_model": {"ground_truth": r"\{2,1\}"}}, 1),
        ("8", {"answer": 7}, 0),
        ("I do not know", {"answer": "7"}, 0),
        ("", {"answer": "7"}, 0),
    ]

    async def run():
        pool = RewardPool(TaskConfig(name="jsonl", reward="math", reward_workers=1))
        found = [(await pool.score(response, row)).value for response, row, _ in cases]
        pool.close()
        return found

    assert asyncio.run(run()) == [expected for *_, expected in cases]


@needs_math
@pytest.mark.slow
def test_a_row_without_a_right_answer_is_named(tmp_path):
    for row, column in (({"prompt": "1"}, "answer"), ({"prompt": "1", "reward_model": {}}, "ground_truth")):
        rows = [{"prompt": "0", "answer": "1"}, row]
        (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = TaskConfig(name="jsonl", train=str(tmp_path / "p.jsonl"), reward="math")
        with pytest.raises(ConfigError, match=rf"line 2 of p\.jsonl has no column {column}"):
            PromptFile(task, TOKENIZER, seed=0, eval_size=1).train_prompts()
