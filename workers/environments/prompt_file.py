"""The user's own prompts from a jsonl or parquet file, rewarded by the user's own function: one turn an episode.

The driver reads and checks the file (`PromptFile.train_prompts`); rollout workers get rows with their prompts and need no
file. Rewards run in processes of their own (`workers.rewards`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rlframe.config import ConfigError, TaskConfig
from rlframe.types import Prompt
from workers.environments.base import EXTRAS, FAILURE, FatalRewardError, Problem, RewardError, StepResult
from workers.environments.options import read_options
from workers.environments.prompt_data import column, place, read_rows
from workers.environments.rendering import render, stop_token_ids
from workers.rewards import RewardFailed, RewardPool, check_reward

EXCERPT = 80


@dataclass
class NoOptions:
    """A prompt file takes no ``task.options``."""


class PromptFile:
    """Prompts of ``task.train``; ``task.eval``, or ``eval_size`` problems held out from it, for evaluation."""

    max_turns = 1

    def __init__(self, task: TaskConfig, tokenizer: Any, *, seed: int, eval_size: int) -> None:
        """Reads nothing yet. Raises ConfigError for an option or a tokenizer without an end-of-sequence token."""
        del seed  # which problems are held out is fixed
        read_options(NoOptions, task.options, task.name)
        self.name, self.task, self.tokenizer, self.eval_size = task.name, task, tokenizer, eval_size
        self.stop_token_ids = stop_token_ids(tokenizer)
        self.rewards = RewardPool(task)

    def train_prompts(self) -> Sequence[Problem]:
        """The training problems; raises ConfigError for a file, a row or a reward function that cannot be used."""
        return self._problems[0]

    def eval_prompts(self) -> Sequence[Problem]:
        """The held-out problems; raises ConfigError as `train_prompts` does."""
        return self._problems[1]

    def episode(self, prompt: Prompt) -> PromptFile.Episode:
        return self.Episode(self, prompt)

    def close(self) -> None:
        """End the reward processes."""
        self.rewards.close()

    @cached_property
    def _problems(self) -> tuple[list[Problem], list[Problem]]:
        assert self.task.train is not None
        verl = check_reward(self.task)
        train = self._read("task.train", self.task.train, verl)
        if self.task.eval is not None:
            return train, [held_out(p) for p in self._read("task.eval", self.task.eval, verl)]
        return split(train, self.eval_size, self.task.train)

    def _read(self, key: str, name: str, verl: bool) -> list[Problem]:
        """One problem a row."""
        rows = read_rows(key, name, self.task.name)
        places = [place(name, self.task.name, number) for number, _ in rows]
        prompts = [column(row, self.task.prompt_key, p, "task.prompt_key") for (_, row), p in zip(rows, places, strict=True)]
        if verl:
            for (_, row), where in zip(rows, places, strict=True):
                model = column(row, "reward_model", where, "task.reward takes ground_truth")
                column(model if isinstance(model, dict) else {}, "ground_truth", f"reward_model in {where}", "task.reward")
        tokens = render(self.tokenizer, prompts, places, self.task.chat_template)
        if self.task.reward == "math":
            for (_, row), where in zip(rows, places, strict=True):
                if "answer" not in row:
                    model = row.get("reward_model")
                    known, name_of = (model, "ground_truth") if isinstance(model, dict) else (row, "answer")
                    column(known, name_of, where, "task.reward=math")
        return [
            Problem(f"{Path(name).name}:{number}", ids, {"row": row, "place": where})
            for (number, row), where, ids in zip(rows, places, tokens, strict=True)
        ]

    class Episode:
        """One answer."""

        def __init__(self, environment: PromptFile, prompt: Prompt) -> None:
            self.environment, self.prompt = environment, prompt

        async def step(self, action: np.ndarray, finish: str) -> StepResult:
            environment, payload = self.environment, self.prompt.payload
            response = environment.tokenizer.decode(action, skip_special_tokens=True)
            try:
                score = await environment.rewards.score(response, payload["row"])
            except RewardFailed as error:
                return self.failed(str(error))
            return StepResult(reward=score.value, done=True, metadata={EXTRAS: score.extras} if score.extras else {})

        def failed(self, reason: str) -> StepResult:
            """What ``task.on_reward_failure`` asks for; an evaluation is over all its problems, so it drops none."""
            task, payload = self.environment.task, self.prompt.payload
            sentence = (
                f"task.reward={task.reward} failed on {payload['place']} "
                f"(prompt {excerpt(payload['row'][task.prompt_key])!r}): {reason}."
            )
            if task.on_reward_failure == "raise":
                raise FatalRewardError(f"{sentence} task.on_reward_failure=drop or zero would go on.")
            if task.on_reward_failure == "drop" and not payload.get("held_out"):
                raise RewardError(sentence)
            return StepResult(reward=0.0, done=True, metadata={FAILURE: reason})


def split(problems: list[Problem], size: int, name: str) -> tuple[list[Problem], list[Problem]]:
    """Hold out ``size`` problems with different prompts; rows with one of these prompts are not trained on.

    A prompt's place in the order in which prompts are held out is a hash of its tokens: the same in every run, whatever the
    order of the file.

    Raises:
        ConfigError: not more than ``size`` different prompts.
    """
    digests = [hashlib.blake2b(problem.tokens.tobytes(), digest_size=16).digest() for problem in problems]
    by_prompt = dict(zip(reversed(digests), reversed(problems), strict=True))  # the first of several stays
    if len(by_prompt) <= size:
        raise ConfigError(
            f"eval.size={size}, but task.train={name} has only {len(by_prompt)} different prompts, so none would be left to "
            "train on; lower eval.size, or give held-out prompts with task.eval."
        )
    chosen = sorted(by_prompt)[:size]
    away = set(chosen)
    train = [problem for problem, digest in zip(problems, digests, strict=True) if digest not in away]
    return train, [held_out(by_prompt[digest]) for digest in chosen]


def held_out(problem: Problem) -> Problem:
    """The problem, marked."""
    return Problem(problem.id, problem.tokens, problem.payload | {"held_out": True})


def excerpt(prompt: Any) -> str:
    """The end of a prompt, on one line."""
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    text = " ".join(text.split())
    return text if len(text) <= EXCERPT else "..." + text[-EXCERPT:]
