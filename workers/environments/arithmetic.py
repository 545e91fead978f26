"""Arithmetic with an exact answer: one turn, reward 1 if the policy wrote the answer and stopped, else 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlframe.config import ConfigError
from rlframe.models.arithmetic import ArithmeticOptions, Sum, arithmetic_problems
from rlframe.types import Prompt
from workers.environments.base import Environment, Problem, StepResult
from workers.environments.options import read_options
from workers.environments.settings import TaskConfig


class Arithmetic(Environment):
    """Problems ``a op b op ...=`` over a range of numbers (`ArithmeticOptions`); held-out ones are never trained on."""

    name = "arithmetic"
    settings = ()

    def __init__(self, task: TaskConfig, tokenizer: Any, *, seed: int, eval_size: int) -> None:
        """Raises ConfigError for an unknown option or more held-out problems than there are."""
        del seed  # which problems there are, and which are held out, is fixed
        options = read_options(ArithmeticOptions, task.options, self.name)
        train, held_out = arithmetic_problems(options)
        if len(held_out) < eval_size:
            raise ConfigError(
                f"eval.size={eval_size}, but arithmetic with {options.terms} numbers from {options.low} to {options.high} "
                f"holds out only {len(held_out)} problems; lower eval.size or raise task.options.high."
            )
        self.tokenizer = tokenizer
        self.stop_token_ids = (int(tokenizer.eos_token_id),)
        self._train = [self._problem(p) for p in train]
        self._eval = [self._problem(p) for p in held_out[:eval_size]]

    def _problem(self, problem: Sum) -> Problem:
        tokens = np.array(self.tokenizer(problem.text, add_special_tokens=False).input_ids, dtype=np.int32)
        return Problem(problem.text, tokens, {"answer": str(problem.answer)})

    def train_prompts(self) -> Sequence[Problem]:
        return self._train

    def eval_prompts(self) -> Sequence[Problem]:
        return self._eval

    def episode(self, prompt: Prompt) -> Arithmetic.Episode:
        return self.Episode(self.tokenizer, prompt)

    class Episode:
        """One answer."""

        def __init__(self, tokenizer: Any, prompt: Prompt) -> None:
            self.tokenizer = tokenizer
            self.answer = prompt.payload["answer"]

        async def step(self, action: np.ndarray, finish: str) -> StepResult:
            text = self.tokenizer.decode(action, skip_special_tokens=True).strip()
            return StepResult(reward=float(finish == "stop" and text == self.answer), done=True, metadata={"answer": text})
