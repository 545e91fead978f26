"""Which settings of prompts and held-out problems make sense; the rest of the configuration is `rlframe.config.checks`."""

from __future__ import annotations

from collections.abc import Collection

from rlframe.config import Config, ConfigError, TaskConfig

GENERATED_TASKS = ("arithmetic", "countdown", "wordle", "reasoning_gym")
LAST_ASSISTANT = ("refuse", "drop", "continue")


def check_task(config: Config) -> None:
    """Refuse a stop that is no token, an unknown ``task.last_assistant`` and a number of held-out problems below 1.

    Raises:
        ConfigError: one sentence that names the setting and what to change.
    """
    task, size = config.task, config.eval.size
    if task.last_assistant not in LAST_ASSISTANT:
        raise ConfigError(f"task.last_assistant={task.last_assistant} is not known; choose one of {', '.join(LAST_ASSISTANT)}.")
    for item in task.stop:
        is_number = isinstance(item, int) and not isinstance(item, bool) and item >= 0
        if not is_number and not (isinstance(item, str) and item):
            raise ConfigError(f"task.stop has {item!r}, which is no token; give its text in quotes, or its number.")
    if size is not None and not size >= 1:
        raise ConfigError(f"eval.size={size} is out of range; it must be at least 1, or null.")


def unused_by_task(task: TaskConfig) -> list[tuple[bool, str, Collection[str]]]:
    """Whether, why and which settings have no effect with this task, as `rlframe.config.unused.unused` wants them."""
    name = f"with task.name={task.name}"
    generated = task.name in GENERATED_TASKS
    return [
        (generated, f"{name}, which makes its own prompts", ("task.prompt_key", "task.tools_key", "task.last_assistant")),
        (generated and not task.chat_template, f"{name} and without task.chat_template=true", ("task.template_args",)),
        (task.name == "arithmetic", name, ("task.stop", "task.template_args")),
    ]
