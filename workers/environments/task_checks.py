"""Checks of the task's settings, and the number of held-out problems, from the environment's class alone."""

from __future__ import annotations

from collections.abc import Collection

from rlframe.config import ConfigError
from rlframe.config.validate import check_fields, refuse
from workers.environments.base import COLUMNS, REWARD_CALLS, SOURCES, Environment
from workers.environments.registry import ENVIRONMENTS, built_in
from workers.environments.settings import TaskConfig
from workers.settings import Config

HELD_OUT = 256
"""Held-out problems by default."""


def check_task(task: TaskConfig, key: str = "task") -> None:
    """Refuse what is out of range, an unknown task, sources of prompts and rewards that it needs or does not read, and a stop
    that is no token.

    Raises:
        ConfigError: one sentence that names the setting and says what to change.
    """
    check_fields(task, key)
    _check_sources(task)
    for item in task.stop:
        is_number = isinstance(item, int) and not isinstance(item, bool) and item >= 0
        refuse(
            not is_number and not (isinstance(item, str) and item),
            f"{key}.stop has {item!r}, which is not a token; give its text in quotes, or its number.",
        )


def _check_sources(task: TaskConfig) -> None:
    environment = built_in(task.name)
    if environment is None:
        return
    for key in SOURCES:
        given = getattr(task, key)
        if given is None and key in environment.needs:
            raise ConfigError(f"task.{key} is not set and task.name={task.name} needs it; set task.{key}=...")
        if given is not None and not reads(environment, key):
            files = " or ".join(name for name in ENVIRONMENTS if (other := built_in(name)) and "train" in other.needs)
            raise ConfigError(
                f"task.{key}={given} is not used by task.name={task.name}; choose task={files} for a file of prompts."
            )


def reads(environment: type[Environment], key: str) -> bool:
    """Whether ``task.key`` has an effect with this environment, as far as it declares."""
    return environment.settings is None or key in environment.settings


def unused_by_task(task: TaskConfig) -> list[tuple[bool, str, Collection[str]]]:
    """Whether, why and which settings have no effect with this task, as `trainer.settings.unused.unused` wants them."""
    environment = built_in(task.name)
    if environment is None or environment.settings is None:
        return []
    name, read = f"with task.name={task.name}", environment.settings
    return [
        *((key not in read, f"{name}, which makes its own prompts", (f"task.{key}",)) for key in COLUMNS),
        *((key not in read, f"{name}, which rewards answers itself", (f"task.{key}",)) for key in REWARD_CALLS),
        *((key not in read, name, (f"task.{key}",)) for key in ("stop", "template_args")),
        (
            "prompt_key" not in read and "template_args" in read and not task.chat_template,
            f"{name} and without task.chat_template=true",
            ("task.template_args",),
        ),
    ]


def eval_size(config: Config) -> int | None:
    """Number of held-out problems; None: all rows of ``task.eval``, where the environment reads that file."""
    environment = built_in(config.task.name)
    from_file = config.task.eval is not None and environment is not None and "eval" in (environment.settings or ())
    if config.eval.size is None and from_file:
        return None
    return HELD_OUT if config.eval.size is None else config.eval.size
