"""Countdown: reach a target from a few numbers, each used exactly once; the equation is checked without `eval`.

One turn, or several (``attempts``): after a wrong answer the environment says what is wrong with it.

The set of problems is fixed by its options; every target can be reached, because it was made from its numbers.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from rlframe.config import ConfigError
from rlframe.types import Prompt
from workers.environments.base import CHATS, Environment, Problem, StepResult
from workers.environments.options import read_options
from workers.environments.rendering import Replies, render
from workers.environments.settings import TaskConfig
from workers.environments.stops import response, stop_token_ids

SEED = 20260
"""Fixes the set of problems."""
MAX_TRIES = 200
"""Draws for each problem that is wanted."""
PLAIN = "{numbers} -> {target}: "
CHAT = (
    "Use the numbers {numbers}, each exactly once, with {operators} and parentheses to make {target}. "
    "Answer with the expression only."
)
MAX_ANSWER = 120
"""Longest expression that is parsed, in characters."""


@dataclass(frozen=True)
class CountdownOptions:
    """Which problems there are and how answers are rewarded."""

    numbers: int = 3
    """How many numbers a problem has."""
    low: int = 1
    """Smallest number."""
    high: int = 9
    """Largest number."""
    operators: str = "+-*"
    """Any of ``+``, ``-``, ``*``, ``/``."""
    max_target: int = 100
    """Largest target; the smallest is 1."""
    problems: int = 4000
    """Training problems."""
    format_reward: float = 0.0
    """Reward of an expression that can be evaluated but is not the answer (of several attempts, the last one counts)."""
    attempts: int = 1
    """Turns; after a wrong answer the next one is a better informed attempt at the same problem."""

    def __post_init__(self) -> None:
        if not 2 <= self.numbers <= 6:
            raise ConfigError(f"task.options.numbers={self.numbers}, but countdown needs 2 to 6 numbers.")
        if not 0 < self.low <= self.high:
            raise ConfigError(f"countdown needs 0 < low <= high, but low={self.low} and high={self.high}.")
        if not self.operators or set(self.operators) - set("+-*/"):
            raise ConfigError(f"countdown supports the operators +-*/, but operators={self.operators!r}.")
        if self.problems < 1 or self.max_target < 1:
            raise ConfigError(f"countdown needs problems={self.problems} and max_target={self.max_target} to be at least 1.")
        if self.attempts < 1:
            raise ConfigError(f"task.options.attempts={self.attempts}, but countdown needs at least one.")
        if not 0 <= self.format_reward < 1:
            raise ConfigError(f"task.options.format_reward={self.format_reward} must be at least 0 and below 1.")


class Countdown(Environment):
    """Reward 1 for an expression with every number once that equals the target; see `CountdownOptions`."""

    name = "countdown"
    settings = CHATS

    def __init__(self, task: TaskConfig, tokenizer: Any, *, seed: int, eval_size: int) -> None:
        """Raises ConfigError for an unknown option, or when there are too few problems."""
        del seed  # which problems there are, and which are held out, is fixed
        self.options = read_options(CountdownOptions, task.options, self.name)
        self.tokenizer, self.task, self.eval_size = tokenizer, task, eval_size
        self.stop_token_ids = stop_token_ids(tokenizer, task.stop, task.template_args)
        self.max_turns = self.options.attempts
        self.replies = Replies(tokenizer, bool(task.chat_template) and self.options.attempts > 1, task.template_args)
        self._split: tuple[list[Problem], list[Problem]] | None = None

    def train_prompts(self) -> Sequence[Problem]:
        return self._problems()[0]

    def eval_prompts(self) -> Sequence[Problem]:
        return self._problems()[1]

    def _problems(self) -> tuple[list[Problem], list[Problem]]:
        """Made when they are asked for; held out are those whose hash comes first."""
        if self._split is None:
            made = make_problems(self.options, self.options.problems + self.eval_size)
            if len(made) <= self.eval_size:
                raise ConfigError(
                    f"eval.size={self.eval_size}, but with these task.options the number of problems is only {len(made)}; "
                    "lower eval.size, or raise task.options.high or numbers."
                )
            made.sort(key=lambda problem: hashlib.blake2b(repr(problem).encode(), digest_size=8).digest())
            texts, places = [self._text(problem) for problem in made], [str(problem) for problem in made]
            tokens = render(self.tokenizer, texts, places, self.task.chat_template, self.task.template_args)
            problems = [
                Problem(
                    PLAIN.format(numbers=_listed(numbers), target=target).strip(), ids, {"numbers": numbers, "target": target}
                )
                for (numbers, target), ids in zip(made, tokens, strict=True)
            ]
            self._split = problems[self.eval_size :], problems[: self.eval_size]
        return self._split

    def _text(self, problem: tuple[list[int], int]) -> str:
        numbers, target = problem
        text = CHAT if self.task.chat_template else PLAIN
        return text.format(numbers=_listed(numbers), target=target, operators=", ".join(self.options.operators))

    def episode(self, prompt: Prompt) -> Countdown.Episode:
        return self.Episode(self, prompt)

    class Episode:
        """One answer, or several attempts."""

        def __init__(self, environment: Countdown, prompt: Prompt) -> None:
            self.environment, self.payload, self.attempts = environment, prompt.payload, 0

        async def step(self, action: np.ndarray, finish: str) -> StepResult:
            options, numbers, target = self.environment.options, self.payload["numbers"], self.payload["target"]
            text = response(self.environment.tokenizer, action, finish, self.environment.stop_token_ids).strip()
            self.attempts += 1
            reward = verify(text, numbers, target, options.format_reward) if finish == "stop" else 0.0
            metadata = {"answer": text, "attempts": self.attempts}
            if reward == 1.0 or self.attempts == options.attempts:
                return StepResult(reward, True, metadata=metadata)
            reply = fault(text, numbers, target) if finish == "stop" else "too long"
            return StepResult(0.0, False, self.environment.replies(reply, action), metadata)


def make_problems(options: CountdownOptions, count: int) -> list[tuple[list[int], int]]:
    """Up to ``count`` different problems: sorted numbers and a target that some expression of all of them reaches."""
    rng = random.Random(SEED)
    found: dict[tuple[tuple[int, ...], int], None] = {}
    for _ in range(count * MAX_TRIES):
        if len(found) == count:
            break
        numbers = [rng.randint(options.low, options.high) for _ in range(options.numbers)]
        target = _reach(numbers, options.operators, rng)
        if target is not None and 1 <= target <= options.max_target:
            found[tuple(sorted(numbers)), target] = None
    return [(list(numbers), target) for numbers, target in found]


def _reach(numbers: list[int], operators: str, rng: random.Random) -> int | None:
    """Combine all numbers at random; None where that gives no whole number."""
    values = [Fraction(number) for number in numbers]
    while len(values) > 1:
        a, b = (values.pop(rng.randrange(len(values))) for _ in range(2))
        value = _apply(rng.choice(operators), a, b)
        if value is None:
            return None
        values.append(value)
    return int(values[0]) if values[0].denominator == 1 else None


def verify(answer: str, numbers: Sequence[int], target: int, format_reward: float = 0.0) -> float:
    """1 for the right expression, ``format_reward`` for any other that can be evaluated, else 0.

    The answer is the last ``<answer>...</answer>`` if there is one, else the whole text. It may end in ``= target``.
    """
    expression, claimed = _expression(answer)
    parsed = evaluate(expression)
    if parsed is None:
        return 0.0
    value, used = parsed
    right = value == target and sorted(used) == sorted(numbers) and claimed in ("", str(target))
    return 1.0 if right else format_reward


def fault(answer: str, numbers: Sequence[int], target: int) -> str:
    """What is wrong with a wrong answer, in a few words."""
    parsed = evaluate(_expression(answer)[0])
    if parsed is None:
        return "not an expression"
    value, used = parsed
    if sorted(used) != sorted(numbers):
        return f"use {_listed(numbers)}"
    return f"that is {value}, not {target}" if value != target else f"write = {target} or nothing behind it"


def _expression(answer: str) -> tuple[str, str]:
    """The expression in an answer, and what it is claimed to be."""
    marked = re.findall(r"<answer>(.*?)</answer>", answer, re.DOTALL)
    expression, _, claimed = (marked[-1] if marked else answer).partition("=")
    return expression, claimed.strip()


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an expression of whole numbers, ``+ - * /`` and parentheses, and the numbers in it; None if it is not
    one, divides by zero or is longer than `MAX_ANSWER`."""
    if len(expression) > MAX_ANSWER or not re.fullmatch(r"[\d+\-*/()\s]+", expression, re.ASCII):
        return None
    tokens = re.findall(r"\d+|[+\-*/()]", expression)
    used: list[int] = []

    def total() -> Fraction:
        value = product()
        while tokens and tokens[0] in "+-":
            value = _combined(tokens.pop(0), value, product())
        return value

    def product() -> Fraction:
        value = atom()
        while tokens and tokens[0] in "*/":
            value = _combined(tokens.pop(0), value, atom())
        return value

    def atom() -> Fraction:
        token = tokens.pop(0) if tokens else ""
        if token == "(":
            value = total()
            if not tokens or tokens.pop(0) != ")":
                raise ValueError
            return value
        used.append(int(token))
        return Fraction(used[-1])

    try:
        value = total()
    except ValueError:
        return None
    return None if tokens else (value, used)


def _combined(operator: str, a: Fraction, b: Fraction) -> Fraction:
    value = _apply(operator, a, b)
    if value is None:
        raise ValueError
    return value


def _apply(operator: str, a: Fraction, b: Fraction) -> Fraction | None:
    if operator == "+":
        return a + b
    if operator == "-":
        return a - b
    if operator == "*":
        return a * b
    return a / b if b else None


def _listed(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
