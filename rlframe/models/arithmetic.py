"""The arithmetic problems and which of them are held out: shared by the tiny model's warm-up and the environment.

It lives in the library because the tiny model is warmed up on training problems only, and what is a training problem must
be the same there and in `workers.environments.arithmetic`. No tokens and no rewards here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from rlframe.config import ConfigError

OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
HELD_OUT_FRACTION = 0.1
MAX_PROBLEMS = 1_000_000


@dataclass(frozen=True)
class ArithmeticOptions:
    """Which problems there are: ``a op b=`` for all operands in the range and all operators."""

    low: int = 0
    """Smallest operand."""
    high: int = 99
    """Largest operand."""
    operators: str = "+"
    """Any of ``+``, ``-``, ``*``."""
    reverse: bool = False
    """Write answers with their last digit first."""

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise ConfigError(f"arithmetic needs 0 <= low <= high, but low={self.low} and high={self.high}.")
        unknown = set(self.operators) - set(OPERATORS)
        if unknown or not self.operators:
            raise ConfigError(f"arithmetic knows the operators {''.join(OPERATORS)}, but operators={self.operators!r}.")
        if (self.high - self.low + 1) ** 2 * len(self.operators) > MAX_PROBLEMS:
            raise ConfigError(f"arithmetic with operands {self.low}..{self.high} has over {MAX_PROBLEMS} problems; lower high.")


@dataclass(frozen=True)
class Sum:
    """One problem."""

    text: str
    """What is asked, for example ``12+34=``; also its identity."""
    answer: str
    """The one right answer."""


def arithmetic_problems(options: ArithmeticOptions) -> tuple[list[Sum], list[Sum]]:
    """All problems, split into training and held-out ones.

    A problem is held out because of a hash of its text, so the split is the same for every seed, option and run. Held-out
    problems come in the order of their hash: the first n are a random sample.
    """
    operands = range(options.low, options.high + 1)
    train, held_out = [], []
    for op in options.operators:
        for a in operands:
            for b in operands:
                answer = str(OPERATORS[op](a, b))
                problem = Sum(f"{a}{op}{b}=", answer[::-1] if options.reverse else answer)
                place = _place(problem.text)
                if place < HELD_OUT_FRACTION:
                    held_out.append((place, problem))
                else:
                    train.append(problem)
    return train, [problem for _, problem in sorted(held_out, key=lambda pair: pair[0])]


def _place(text: str) -> float:
    """A fixed pseudo-random number in [0, 1) for a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2**64
