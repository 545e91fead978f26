"""The user's own prompts from a jsonl or parquet file, rewarded by the user's own function: one turn an episode.

The driver reads and checks the file (`PromptFile.train_prompts`); rollout workers get rows with their prompts and need no
file. Rewards run in processes of their own (`workers.rewards.pool`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rlframe.config import ConfigError
from rlframe.types import Prompt
from workers.environments.base import (
    CHATS,
    COLUMNS,
    EXTRAS,
    FAILURE,
    REWARD_CALLS,
    SOURCES,
    Environment,
    FatalRewardError,
    Problem,
    RewardError,
    StepResult,
    digest,
)
from workers.environments.chats import Chat, read_prompt
from workers.environments.options import read_options
from workers.environments.prompt_data import column, place, printable, read_rows
from workers.environments.rendering import render
from workers.environments.settings import TaskConfig
from workers.environments.stops import response, stop_token_ids
from workers.rewards.pool import RewardFailed, RewardPool, check_reward

EXCERPT = 80


@dataclass
class NoOptions:
    """A prompt file takes no ``task.options``."""


@dataclass
class Question:
    """A problem, and what tells its prompt from others."""

    problem: Problem
    prompt: str
    """Digest of the prompt before it is rendered."""


class PromptFile(Environment):
    """Prompts of ``task.train``; those of ``task.eval``, or problems held out from ``task.train``, for evaluation."""

    settings: ClassVar[tuple[str, ...] | None] = (*SOURCES, *COLUMNS, *REWARD_CALLS, *CHATS)
    needs: ClassVar[tuple[str, ...]] = ("train", "reward")

    def __init__(self, task: TaskConfig, tokenizer: Any, *, seed: int, eval_size: int | None) -> None:
        """Reads nothing yet; ``eval_size`` None asks for all of ``task.eval``.

        Raises ConfigError for an option, a stop or a tokenizer without an end-of-sequence token.
        """
        del seed  # which problems are held out is fixed
        read_options(NoOptions, task.options, task.name)
        self.name, self.task, self.tokenizer, self.eval_size = task.name, task, tokenizer, eval_size
        self.stop_token_ids = stop_token_ids(tokenizer, task.stop, task.template_args)
        self.rewards = RewardPool(task)
        self.notes: list[str] = []

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
        if self.task.eval is None:
            return self._split(train, f"task.train={self.task.train}")
        found, size = self._read("task.eval", self.task.eval, verl), self.eval_size
        if size is not None and size != len(found):
            kind = "a random sample, the same in every run" if size < len(found) else "all that there are"
            self.notes.append(
                f"Evaluations use {min(size, len(found))} of the {len(found)} rows of task.eval={self.task.eval} "
                f"(eval.size={size}): {kind}."
            )
        return [question.problem for question in train], [held_out(p) for p in sample(found, size)]

    def _split(self, questions: list[Question], name: str) -> tuple[list[Problem], list[Problem]]:
        """Training and held-out problems of one set."""
        assert self.eval_size is not None
        if self.held_out_by_tokens:
            questions = [replace(q, prompt=blake2b(q.problem.tokens.tobytes(), digest_size=16).hexdigest()) for q in questions]
        train, evaluation = split(questions, self.eval_size, name)
        self.notes.append(
            f"Evaluations use {len(evaluation)} of the {len(questions)} rows of {name}: a random sample, the same in every "
            f"run. {len(train)} are trained on."
        )
        return train, evaluation

    def _read(self, setting: str, name: str, verl: bool) -> list[Question]:
        """One problem a row."""
        task = self.task
        texts = [key for key in (task.prompt_key, task.tools_key) if key]
        rows = [(place(name, task.name, number), number, row) for number, row in read_rows(setting, name, task.name, texts)]
        prompts: list[str | Chat] = []
        contents = []
        named = "" if task.prompt_key == "prompt" else f", column {printable(task.prompt_key)}"
        for where, _, row in rows:
            self._check_row(row, where, verl)
            tools = row.get(task.tools_key) if task.tools_key else None
            prompt, answer = read_prompt(column(row, task.prompt_key, where, "task.prompt_key"), tools, task, where + named)
            prompts.append(prompt)
            contents.append(digest(row))
            if answer is not None:
                row.setdefault("reference", answer)
        places = [where + named for where, _, _ in rows]
        tokens = render(self.tokenizer, prompts, places, task.chat_template, task.template_args)
        return [
            Question(
                Problem(f"{Path(name).name}:{number}", ids, {"row": row, "place": where}, content),
                digest(prompt) if isinstance(prompt, str) else prompt.content,
            )
            for (where, number, row), ids, prompt, content in zip(rows, tokens, prompts, contents, strict=True)
        ]

    def _check_row(self, row: dict[str, Any], where: str, verl: bool) -> None:
        """Refuse a row without what ``task.reward`` compares with."""
        if verl:
            model = column(row, "reward_model", where, "task.reward takes ground_truth")
            column(model if isinstance(model, dict) else {}, "ground_truth", f"reward_model in {where}", "task.reward")
        if self.task.reward == "math" and "answer" not in row:
            model = row.get("reward_model")
            known, name = (model, "ground_truth") if isinstance(model, dict) else (row, "answer")
            column(known, name, where, "task.reward=math")

    class Episode:
        """One answer."""

        def __init__(self, environment: PromptFile, prompt: Prompt) -> None:
            self.environment, self.prompt = environment, prompt

        async def step(self, action: np.ndarray, finish: str) -> StepResult:
            environment, payload = self.environment, self.prompt.payload
            text = response(environment.tokenizer, action, finish, environment.stop_token_ids)
            try:
                score = await environment.rewards.score(text, payload["row"])
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
                raise FatalRewardError(f"{sentence} task.on_reward_failure=drop or zero would continue.")
            if task.on_reward_failure == "drop" and not payload.get("held_out"):
                raise RewardError(sentence)
            return StepResult(reward=0.0, done=True, metadata={FAILURE: reason})


def split(questions: list[Question], size: int, name: str) -> tuple[list[Problem], list[Problem]]:
    """Hold out ``size`` problems with different prompts; rows with one of these prompts are not trained on.

    A prompt's place in the order in which prompts are held out is a digest: the same in every run, whatever the order of the
    file. Rows that render to the tokens of a held-out one are not trained on either.

    Raises:
        ConfigError: not more than ``size`` different prompts.
    """
    by_prompt = {question.prompt: question.problem for question in reversed(questions)}  # the first of several stays
    if len(by_prompt) <= size:
        raise ConfigError(
            f"eval.size={size}, but {name} has only {len(by_prompt)} different prompts, so none would be left to "
            "train on; lower eval.size, or give held-out prompts with task.eval."
        )
    chosen = sorted(by_prompt)[:size]
    tokens = {by_prompt[prompt].tokens.tobytes() for prompt in chosen}
    away = set(chosen)
    train = [q.problem for q in questions if q.prompt not in away and q.problem.tokens.tobytes() not in tokens]
    if not train:
        raise ConfigError(
            f"eval.size={size}, but {name} has no prompt that differs from these once it is rendered; lower eval.size."
        )
    return train, [held_out(by_prompt[prompt]) for prompt in chosen]


def sample(questions: list[Question], size: int | None) -> list[Problem]:
    """``size`` problems in the order of the file (None: all), chosen by a digest of their rows, so the same in every run."""
    order = sorted(range(len(questions)), key=lambda i: questions[i].problem.content)
    return [questions[i].problem for i in sorted(order[:size])]


def held_out(problem: Problem) -> Problem:
    """The problem, marked."""
    return replace(problem, payload=problem.payload | {"held_out": True})


def excerpt(prompt: Any) -> str:
    """The end of a prompt, on one line."""
    last = prompt[-1] if isinstance(prompt, list) and prompt else prompt
    text = " ".join(str(last.get("content") if isinstance(last, dict) else last).split())
    return text if len(text) <= EXCERPT else "..." + text[-EXCERPT:]
