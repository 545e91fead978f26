"""Prompts and rewards: their settings, and which of them make sense."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Optional

from rlframe.config.validate import above, at_least, check_fields, choice, refuse

PROMPT_FILES = ("jsonl", "parquet")
"""Tasks that read ``task.train`` and ``task.eval``."""
GENERATED_TASKS = ("arithmetic", "countdown", "wordle", "reasoning_gym")


@dataclass
class TaskConfig:
    """Where prompts come from and how answers are rewarded."""

    name: str = "arithmetic"
    """Name of the environment: arithmetic, countdown, wordle, reasoning_gym, jsonl, parquet; or ``module:factory``."""
    train: Optional[str] = None
    """File of training prompts (jsonl, parquet)."""
    eval: Optional[str] = None
    """File of held-out prompts, used whole where ``eval.size`` is null; without one, problems are held out from ``train``."""
    reward: Optional[str] = None
    """Reward function of a prompt file: ``module:function`` (the current directory is searched, too), or ``math``."""
    reward_workers: int = field(default=2, metadata=at_least(1))
    """Processes that run the reward function, for each rollout worker."""
    reward_timeout_s: float = field(default=30.0, metadata=above(0))
    """Longest time that one call of the reward function may take."""
    reward_startup_timeout_s: float = field(default=60.0, metadata=above(0))
    """Longest time that importing the reward function may take."""
    reward_memory_mb: Optional[int] = field(default=None, metadata=at_least(32, optional=True))
    """Most memory that a process of the reward function may allocate; null: no limit."""
    on_reward_failure: str = field(default="raise", metadata=choice(("raise", "drop", "zero")))
    """When the reward function fails, hangs, crashes or returns no finite number: ``raise`` ends the run, ``drop`` leaves
    the rollout out (0 in an evaluation), ``zero`` rewards it with 0."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: a string, or chat messages (a list, or one written as JSON)."""
    tools_key: Optional[str] = "tools"
    """Column of a chat's tools (JSON schemas), which the chat template renders, where there is one; null: none are rendered."""
    chat_template: Optional[bool] = None
    """Render string prompts through the tokenizer's chat template; null: only chat messages are rendered."""
    template_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as ``enable_thinking: false``."""
    last_assistant: str = field(default="refuse", metadata=choice(("refuse", "drop", "continue")))
    """Chats whose last message is the assistant's: ``refuse`` them, ``drop`` that message (the row keeps it as ``reference``),
    or ``continue`` it."""
    stop: list[Any] = field(default_factory=list)
    """More tokens that end an answer, by text or number, beside those of the tokenizer, the model's files and the end of a turn
    in the chat template."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment."""


def check_task(task: TaskConfig, key: str = "task") -> None:
    """Refuse a stop that is no token, and files of prompts that are missing or not used.

    Raises:
        ConfigError: one sentence that names the setting and says what to change.
    """
    check_fields(task, key)
    for item in task.stop:
        is_number = isinstance(item, int) and not isinstance(item, bool) and item >= 0
        refuse(
            not is_number and not (isinstance(item, str) and item),
            f"{key}.stop has {item!r}, which is no token; give its text in quotes, or its number.",
        )
    for name in ("train", "reward", "eval"):
        given = getattr(task, name)
        refuse(
            task.name in PROMPT_FILES and given is None and name != "eval",
            f"{key}.{name} is not set and {key}.name={task.name} needs it; set {key}.{name}=...",
        )
        refuse(
            task.name in GENERATED_TASKS and given is not None,
            f"{key}.{name}={given} is not used by {key}.name={task.name}; choose task=jsonl or parquet for a file of prompts.",
        )


def unused_by_task(task: TaskConfig) -> list[tuple[bool, str, Collection[str]]]:
    """Whether, why and which settings have no effect with this task, as `trainer.settings.unused.unused` wants them."""
    name = f"with task.name={task.name}"
    generated = task.name in GENERATED_TASKS
    return [
        (generated, f"{name}, which makes its own prompts", ("task.prompt_key", "task.tools_key", "task.last_assistant")),
        (generated and not task.chat_template, f"{name} and without task.chat_template=true", ("task.template_args",)),
        (task.name == "arithmetic", name, ("task.stop", "task.template_args")),
    ]
