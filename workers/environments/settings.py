"""Settings of prompts and rewards; `workers.environments.task_checks` checks them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from rlframe.config.validate import above, at_least, choice


@dataclass
class TaskConfig:
    """Where prompts come from and how answers are rewarded."""

    name: str = "arithmetic"
    """Name of the environment, such as arithmetic or jsonl (docs/tasks.md has all); or ``module:factory`` of your own."""
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
