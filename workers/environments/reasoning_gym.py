"""Problems of reasoning-gym by the name of a data set: one turn, scored by the data set itself in a reward process.

The extra is called ``reasoning-gym``; the library is never imported here (`workers.environments.reasoning_problems` says why).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rlframe.config import ConfigError
from workers.environments.base import CHATS, REWARD_CALLS, Problem, digest
from workers.environments.options import read_options
from workers.environments.prompt_file import PromptFile, Question
from workers.environments.rendering import render
from workers.environments.settings import TaskConfig
from workers.rewards.process import ENVIRONMENT

SCRIPT = Path(__file__).with_name("reasoning_problems.py")
SEED = 20260
"""Seed of the problems where ``config`` gives none; which problems there are does not depend on the run's seed."""


@dataclass(frozen=True)
class ReasoningGymOptions:
    """Which problems."""

    dataset: str = ""
    """Name of the data set, such as ``chain_sum``."""
    config: dict[str, Any] = field(default_factory=dict)
    """Arguments of the data set, such as ``min_terms: 3``."""
    problems: int = 2000
    """Training problems; repeated questions are kept, but none that is held out."""
    instruction: str = ""
    """Text behind every question."""


class ReasoningGym(PromptFile):
    """One problem a question; the answer is the last ``<answer>...</answer>``, else the whole response."""

    settings = (*CHATS, *REWARD_CALLS)
    needs = ()

    def __init__(self, task: TaskConfig, tokenizer: Any, *, seed: int, eval_size: int) -> None:
        """Raises ConfigError when the package is not installed, or for an option that cannot be used."""
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ConfigError("task=reasoning_gym needs the package reasoning-gym: pip install 'rlframe[reasoning-gym]'.")
        self.options = read_options(ReasoningGymOptions, task.options, task.name)
        if not self.options.dataset:
            raise ConfigError("task.options.dataset is not set and task=reasoning_gym needs it, such as dataset=chain_sum.")
        scored = replace(task, reward="workers.environments.reasoning_problems:score", prompt_key="question", options={})
        super().__init__(scored, tokenizer, seed=seed, eval_size=eval_size)

    @cached_property
    def _problems(self) -> tuple[list[Problem], list[Problem]]:
        assert self.eval_size is not None  # there is no file of held-out problems
        name = self.options.dataset
        config = {"seed": SEED, **self.options.config, "size": self.options.problems + self.eval_size}
        questions = ask(name, config)
        places = [f"problem {i} of {name}" for i in range(len(questions))]
        texts = [f"{question}\n{self.options.instruction}".strip() for question in questions]
        rows = [{"dataset": name, "config": config, "index": i, "question": question} for i, question in enumerate(questions)]
        tokens = render(self.tokenizer, texts, places, self.task.chat_template, self.task.template_args)
        return self._split(
            [
                Question(
                    Problem(f"{name}:{row['index']}", ids, {"row": row, "place": place}, digest(row)), digest(row["question"])
                )
                for row, place, ids in zip(rows, places, tokens, strict=True)
            ],
            f"the data set {name}",
        )


def ask(name: str, config: dict[str, Any]) -> list[str]:
    """All questions of a data set.

    Raises:
        ConfigError: no such data set, or a configuration that it does not take.
    """
    ended = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), name, json.dumps(config, sort_keys=True)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise ConfigError(f"reasoning-gym could not make {name}: {(ended.stderr.strip().splitlines() or ['no reason'])[-1]}.")
    reply = json.loads(ended.stdout.splitlines()[-1])
    if "error" in reply:
        raise ConfigError(reply["error"])
    return list(reply["questions"])
