"""The arithmetic problems and which of them are held out: shared by the tiny model's warm-up and the environment.

It lives in the library because the tiny model is warmed up on training problems only, and what is a training problem must
be the same there and in `workers.environments.arithmetic`. No tokens and no rewards here.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from rlframe.config import ConfigError

OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
HELD_OUT_FRACTION = 0.15
MAX_PROBLEMS = 1_000_000


@dataclass(frozen=True)
class ArithmeticOptions:
    """Which problems there are: ``a op b op c op d=`` for all numbers in the range and all operators."""

    terms: int = 4
    """Numbers in a problem."""
    low: int = 0
    """Smallest number."""
    high: int = 6
    """Largest number."""
    operators: str = "+"
    """Any of ``+``, ``-``, ``*``; one problem has one operator, applied from left to right."""

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise ConfigError(f"arithmetic needs 0 <= low <= high, but low={self.low} and high={self.high}.")
        if self.terms < 2:
            raise ConfigError(f"arithmetic needs at least two numbers in a problem, but terms={self.terms}.")
        if not self.operators or set(self.operators) - set(OPERATORS):
            raise ConfigError(f"arithmetic supports the operators {''.join(OPERATORS)}, but operators={self.operators!r}.")
        if (self.high - self.low + 1) ** self.terms * len(self.operators) > MAX_PROBLEMS:
            raise ConfigError(
                f"arithmetic with {self.terms} numbers from {self.low} to {self.high} has over {MAX_PROBLEMS:,} problems; "
                "lower terms or high."
            )


@dataclass(frozen=True)
class Sum:
    """One problem."""

    text: str
    """What is asked, for example ``1+2+3+4=``; also its identity."""
    answer: int
    """The right answer."""


def arithmetic_problems(options: ArithmeticOptions) -> tuple[list[Sum], list[Sum]]:
    """All problems, split into training and held-out ones.

    A problem is held out because of a hash of its text, so the split is the same for every seed, option and run. Held-out
    problems come in the order of their hash: the first n are a random sample.
    """
    train, held_out = [], []
    for op in options.operators:
        for numbers in itertools.product(range(options.low, options.high + 1), repeat=options.terms):
            problem = Sum(op.join(map(str, numbers)) + "=", functools.reduce(OPERATORS[op], numbers))
            place = _place(problem.text)
            if place < HELD_OUT_FRACTION:
                held_out.append((place, problem))
            else:
                train.append(problem)
    return train, [problem for _, problem in sorted(held_out, key=lambda pair: pair[0])]


def _place(text: str) -> float:
    """A fixed pseudo-random number in [0, 1) for a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2**64
