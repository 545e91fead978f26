"""Countdown: what counts as an answer, and that every target can be reached."""

import asyncio
import itertools

import numpy as np
import pytest

from rlframe.config import ConfigError
from rlframe.models.characters import character_tokenizer
from rlframe.types import Prompt
from workers.environments.countdown import CountdownOptions, evaluate, make_problems, verify
from workers.environments.registry import make_environment
from workers.environments.settings import TaskConfig

TOKENIZER = character_tokenizer()


def countdown(eval_size=8, chat_template=None, **options):
    task = TaskConfig(name="countdown", options={"problems": 50, **options}, chat_template=chat_template)
    return make_environment(task, TOKENIZER, seed=0, eval_size=eval_size)


def reachable(numbers, operators="+-*/"):
    """Every value that all numbers together give, by brute force over Python's own arithmetic on pairs."""
    if len(numbers) == 1:
        return {numbers[0]}
    values = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
        a, b = numbers[i], numbers[j]
        made = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}
        for operator in operators:
            if made[operator] is not None:
                values |= reachable([*rest, made[operator]], operators)
    return values


@pytest.mark.parametrize("operators", ["+-", "+-*/"])
def test_every_target_can_be_reached_from_its_numbers(operators):
    for numbers, target in make_problems(CountdownOptions(operators=operators), 60):
        assert any(abs(value - target) < 1e-9 for value in reachable(numbers, operators))
        assert 1 <= target <= 100


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("(5-2)*7", 1.0),
        ("7 * (5 - 2) = 21", 1.0),
        ("thinking 1+1 <answer> 5*7-2*7 </answer> no: <answer>(5-2)*7</answer>", 1.0),
        ("(5-2)*7=22", 0.1),
        ("5+2+7", 0.1),
        ("21", 0.1),
        ("(5-2)*7*1", 0.1),
        ("7*3", 0.1),
        ("(5-2*7", 0.0),
        ("5--2", 0.0),
        ("", 0.0),
        ("the answer is (5-2)*7", 0.0),
        ("5**7", 0.0),
        ("__import__('os')", 0.0),
        ("7/(5-5)", 0.0),
        ("(" * 100 + "5", 0.0),
        ("9" * 5000, 0.0),
    ],
)
def test_verify(answer, reward):
    assert verify(answer, [2, 5, 7], 21, format_reward=0.1) == reward


@pytest.mark.parametrize("expression", ["2+3*4", "(2+3)*4", "8/3/2", "2-3-4", "2*(3-(4-5))*6", "10-4/2"])
def test_the_parser_agrees_with_python(expression):
    value, _ = evaluate(expression)
    assert float(value) == pytest.approx(eval(expression))


def test_held_out_problems_are_fixed_and_never_trained_on():
    env = countdown()
    train, held_out = env.train_prompts(), env.eval_prompts()
    assert len(train) == 50 and len(held_out) == 8
    assert not {p.id for p in train} & {p.id for p in held_out}
    assert [p.id for p in countdown().eval_prompts()] == [p.id for p in held_out]
    assert all(TOKENIZER.unk_token_id not in p.tokens for p in train)


def test_a_chat_model_is_asked_in_words():
    text = TOKENIZER.decode(countdown(chat_template=True).train_prompts()[0].tokens)
    assert text.startswith("use the numbers ") and "each exactly once" in text


@pytest.mark.parametrize(("finish", "reward"), [("stop", 1.0), ("length", 0.0)])
def test_an_episode_is_one_answer_that_the_policy_ended(finish, reward):
    prompt = Prompt("p", 0, np.array([1]), "countdown", {"numbers": [1, 2, 3], "target": 7})
    action = np.array([*TOKENIZER("1+2*3").input_ids, TOKENIZER.eos_token_id], np.int32)
    result = asyncio.run(countdown().episode(prompt).step(action, finish))
    assert (result.reward, result.done) == (reward, True)


def test_several_attempts_are_told_what_is_wrong_until_one_is_right():
    env = countdown(attempts=5)
    episode = env.episode(Prompt("p", 0, np.array([1]), "countdown", {"numbers": [1, 2, 3], "target": 7}))

    async def attempts(*answers):
        turns = [np.array([*TOKENIZER(text).input_ids, TOKENIZER.eos_token_id], np.int32) for text in answers]
        return [
            await episode.step(turn, "length" if text == "1+1+1" else "stop") for turn, text in zip(turns, answers, strict=True)
        ]

    *wrong, right = asyncio.run(attempts("1+2+3", "7", "what", "1+1+1", "1+2*3"))
    said = [TOKENIZER.decode(result.observation) for result in wrong]
    assert said == ["\nthat is 6, not 7\n", "\nuse 1 2 3\n", "\nnot an expression\n", "\ntoo long\n"]
    assert [r.reward for r in wrong] == [0] * 4 and not any(r.done for r in wrong)
    assert (right.reward, right.done) == (1, True) and env.max_turns == 5


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"number": 3}, "did you mean numbers"),
        ({"numbers": 9}, "needs 2 to 6 numbers"),
        ({"attempts": 0}, "attempts=0"),
        ({"operators": "^"}, "supports the operators"),
        ({"low": 5, "high": 2}, "low <= high"),
        ({"low": 2, "high": 2, "numbers": 2}, "eval.size=8, .* number of problems is only 1;"),
    ],
)
def test_options_that_cannot_be_used_are_one_sentence(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        countdown(**options).train_prompts()
