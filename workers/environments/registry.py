"""The environments by the name that ``task.name`` gives them: a new one is its file and a line here.

An environment outside of this repository needs no line: ``task.name=my_module:factory`` names a class or function. See
`workers.environments.base` for the protocol. No environment is imported before it is needed.
"""

from __future__ import annotations

from typing import Any

from rlframe.config import ConfigError
from rlframe.config.validate import nearest
from rlframe.plugins import load
from workers.environments.base import Environment, missing_members
from workers.environments.settings import TaskConfig

ENVIRONMENTS = {
    "arithmetic": "workers.environments.arithmetic:Arithmetic",
    "countdown": "workers.environments.countdown:Countdown",
    "wordle": "workers.environments.wordle:Wordle",
    "reasoning_gym": "workers.environments.reasoning_gym:ReasoningGym",
    "jsonl": "workers.environments.prompt_file:PromptFile",
    "parquet": "workers.environments.prompt_file:PromptFile",
}
"""Name -> the class, as ``module:class``."""


def built_in(name: str) -> type[Environment] | None:
    """The class of an environment of `ENVIRONMENTS`; None for a custom ``module:factory``, which is not imported.

    Raises:
        ConfigError: it is neither.
    """
    if name in ENVIRONMENTS:
        return load("task.name", ENVIRONMENTS[name])
    if ":" in name:
        return None
    near = nearest(name, ENVIRONMENTS)
    raise ConfigError(
        f"task.name={name} is not an environment; did you mean {near}? "
        f"(Known: {', '.join(ENVIRONMENTS)}, or module:factory of your own.)"
    )


def make_environment(task: TaskConfig, tokenizer: Any, *, seed: int, eval_size: int | None) -> Environment:
    """Build the environment ``task.name``: one of `ENVIRONMENTS`, or a custom ``module:factory``.

    Args:
        task: what to build, with its options.
        tokenizer: a Hugging Face tokenizer.
        seed: seed of everything the environment draws, except which problems are held out.
        eval_size: number of held-out problems; None (where it reads ``task.eval``): all of them.

    Raises:
        ConfigError: unknown name, unknown option, data that cannot be used, or an object that is not an environment; one
            sentence for the user.
    """
    build: Any = built_in(task.name) or load("task.name", task.name)
    environment = build(task, tokenizer, seed=seed, eval_size=eval_size)
    if missing := missing_members(environment):
        raise ConfigError(
            f"task.name={task.name} made a {type(environment).__name__} without {', '.join(missing)}; derive its class from "
            "workers.environments.base.Environment, which has defaults, and define the rest."
        )
    return environment
