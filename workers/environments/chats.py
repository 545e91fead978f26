"""What a prompt of a data set is: a text, or a chat with its tools. `workers.environments.rendering` makes tokens of it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from rlframe.config import ConfigError
from workers.environments.base import digest
from workers.environments.settings import TaskConfig

_LOOKS_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:""")
_FORM = 'a list of messages {"role": ..., "content": ...}'


@dataclass
class Chat:
    """A conversation that the policy answers, or whose last message it continues."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the functions that the policy may call."""
    continued: bool = False
    """The last message is the assistant's, and the policy continues it."""

    @property
    def content(self) -> str:
        """`digest` of the conversation."""
        return digest([self.messages, self.tools, self.continued])


def read_prompt(value: Any, tools: Any, task: TaskConfig, place: str) -> tuple[str | Chat, str | None]:
    """What a row's columns ask for under the settings ``task.chat_template`` and ``task.last_assistant``.

    Args:
        value: the prompt: a text, a list of messages, or such a list written as JSON.
        tools: the column ``task.tools_key``, or None; only chats have tools.
        task: the settings.
        place: where the row is, for messages to the user.

    Returns:
        A text that is tokenised as it is or a chat, and the assistant's message that was taken off its end, if one was.

    Raises:
        ConfigError: the prompt is empty or neither of both, or its messages or tools cannot be used.
    """
    if isinstance(value, str) and _LOOKS_LIKE_MESSAGES.match(value):
        value = _parsed(value, f"{place}: the prompt begins like a list of messages, but")
    if not value or (isinstance(value, str) and not value.strip()):
        raise ConfigError(f"{place}: the prompt is empty.")
    if isinstance(value, str):
        if not task.chat_template:
            return value, None
        value = [{"role": "user", "content": value}]
    if task.chat_template is False:
        raise ConfigError(f"{place}: the prompt is a list of chat messages, and task.chat_template=false forbids them.")
    return _answered(Chat(_messages(value, place), _tools(tools, task, place)), task, place)


def _answered(chat: Chat, task: TaskConfig, place: str) -> tuple[Chat, str | None]:
    """Leave the policy a turn to answer where the assistant has the last message."""
    last = chat.messages[-1]
    if last["role"] != "assistant":
        return chat, None
    if task.last_assistant == "refuse":
        raise ConfigError(
            f"{place}: the last message of the prompt is the assistant's, so its answer would stand in the prompt; set "
            "task.last_assistant=drop to leave it out, or continue to let the policy continue it."
        )
    if task.last_assistant == "continue":
        if last["content"]:
            return Chat(chat.messages, chat.tools, continued=True), None
        return Chat(_others(chat, place), chat.tools), None  # an empty beginning is the header alone
    return Chat(_others(chat, place), chat.tools), last["content"]


def _others(chat: Chat, place: str) -> list[dict[str, Any]]:
    others = chat.messages[:-1]
    if not others or others[-1]["role"] == "assistant":
        what = "is nothing but the assistant's" if not others else "ends with two messages of the assistant"
        raise ConfigError(f"{place}: the prompt {what}; give a conversation that ends with a question.")
    return others


def _messages(value: Any, place: str) -> list[dict[str, Any]]:
    """The messages with only the keys that have a value: parquet gives every message the keys of all."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise ConfigError(f"{place}: the prompt is neither a string nor {_FORM}.")
    messages = [_without_nulls(message) for message in value]
    for message in messages:
        if message.get("tool_calls"):
            message.setdefault("content", "")
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ConfigError(f"{place}: the prompt is neither a string nor {_FORM}.")
    return messages


def _tools(value: Any, task: TaskConfig, place: str) -> list[dict[str, Any]] | None:
    """JSON schemas of tools, given as a list of objects or as JSON, whole or one by one."""
    where = f"{place}: the column {task.tools_key} (task.tools_key)"
    if isinstance(value, str):
        value = _parsed(value, where) if value.strip() else None
    if not value:
        return None
    tools = [_parsed(tool, where) if isinstance(tool, str) else tool for tool in value] if isinstance(value, list) else [value]
    if not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"{where} is not a list of tools, each a JSON schema; set task.tools_key=null to render none.")
    return [_without_nulls(tool) for tool in tools]


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} is not JSON: {' '.join(str(error).split())}.") from None


def _without_nulls(value: Any) -> Any:
    """The value without the keys whose value is null."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
