"""Environments by name. `base` has the protocol; every other module is one environment."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlframe.config import ConfigError
from rlframe.config.validate import nearest
from workers.environments.settings import TaskConfig

if TYPE_CHECKING:
    from workers.environments.base import Environment

ENVIRONMENTS = {
    "arithmetic": "workers.environments.arithmetic:Arithmetic",
    "countdown": "workers.environments.countdown:Countdown",
    "wordle": "workers.environments.wordle:Wordle",
    "reasoning_gym": "workers.environments.reasoning_gym:ReasoningGym",
    "jsonl": "workers.environments.prompt_file:PromptFile",
    "parquet": "workers.environments.prompt_file:PromptFile",
}
"""Name to ``module:factory``, imported when it is asked for."""


def make_environment(task: TaskConfig, tokenizer: Any, *, seed: int, eval_size: int | None) -> Environment:
    """Build the environment ``task.name``: one of `ENVIRONMENTS`, or ``module:factory`` of the user's own.

    Args:
        task: what to build, with its options.
        tokenizer: a Hugging Face tokenizer.
        seed: seed of everything the environment draws, except which problems are held out.
        eval_size: number of held-out problems; None (for a prompt file with ``task.eval``): all of them.

    Raises:
        ConfigError: unknown name, unknown option, or data that cannot be used; one sentence for the user.
    """
    path = ENVIRONMENTS.get(task.name, task.name)
    if ":" not in path:
        near = nearest(task.name, ENVIRONMENTS)
        raise ConfigError(
            f"task.name={task.name} is not an environment; did you mean {near}? "
            f"(Known: {', '.join(ENVIRONMENTS)}, or module:factory of your own.)"
        )
    module, _, factory = path.partition(":")
    try:
        build = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"task.name={task.name} cannot be imported: {error}.") from error
    return build(task, tokenizer, seed=seed, eval_size=eval_size)
