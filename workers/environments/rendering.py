"""Renders prompts (text or chats) and an environment's replies between turns to tokens.

Sampled turns are never rendered: they stay the tokens that were sampled.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jinja2.defaults
import jinja2.meta
import numpy as np

from rlframe.config import ConfigError
from rlframe.config.validate import nearest
from workers.environments.chats import Chat, read_prompt
from workers.environments.settings import TaskConfig

PROVIDED = {*jinja2.defaults.DEFAULT_NAMESPACE, "raise_exception", "strftime_now"}
"""Names that jinja and transformers define for every chat template."""
STAND_IN = "WHAT-THE-POLICY-SAID"
"""Placeholder for a turn of the policy, used to find out what a chat template writes around one."""


class Template:
    """The tokenizer's chat template with ``task.template_args``."""

    def __init__(self, tokenizer: Any, arguments: dict[str, Any] | None = None) -> None:
        """Raises ConfigError for an argument that the template does not read."""
        self.tokenizer, self.arguments = tokenizer, arguments or {}
        if self.arguments:
            _check_arguments(tokenizer, self.arguments)

    def __call__(
        self,
        messages: list[dict[str, Any]],
        place: str,
        *,
        tools: list[dict[str, Any]] | None = None,
        header: bool = True,
        continued: bool = False,
    ) -> str:
        """The messages as text.

        Args:
            messages: ``{"role": ..., "content": ...}`` and what else the template reads.
            place: where they came from, for messages to the user.
            tools: JSON schemas of tools.
            header: append the header of the answer.
            continued: leave the last message open instead.

        Raises:
            ConfigError: there is no chat template, or it refuses the messages.
        """
        if self.tokenizer.chat_template is None:
            raise ConfigError(
                f"{place}: the prompt is a chat, but the model's tokenizer has no chat template; use plain strings."
            )
        read = names_read(self.tokenizer, tools) if tools else None
        if read is not None and "tools" not in read:
            raise ConfigError(
                f"{place}: the prompt has tools, but the tokenizer's chat template renders none; set task.tools_key=null to "
                "leave them out."
            )
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                add_generation_prompt=header and not continued,
                continue_final_message=continued,
                tokenize=False,
                **self.arguments,
            )
        except Exception as error:  # templates are programs of the model's authors and may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"{place}: the tokenizer's chat template refuses the messages: {reason:.300}.") from None


def names_read(tokenizer: Any, tools: Any = None) -> set[str] | None:
    """The variables that a tokenizer's chat template reads; None where it cannot be parsed here."""
    try:
        return _names_in(tokenizer.get_chat_template(tools=tools))
    except ValueError:  # several templates, none of which is the default
        return None


@lru_cache(maxsize=8)
def _names_in(template: str) -> set[str] | None:
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)  # a tag of transformers alone
    try:
        parsed = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except jinja2.TemplateError:
        return None
    return jinja2.meta.find_undeclared_variables(parsed) - PROVIDED


def _check_arguments(tokenizer: Any, arguments: dict[str, Any]) -> None:
    if tokenizer.chat_template is None:
        raise ConfigError("task.template_args is set, but the model's tokenizer has no chat template; leave it out.")
    ours = set(inspect.signature(tokenizer.apply_chat_template).parameters) | {"messages"}
    read = names_read(tokenizer)
    for name in arguments:
        if name in ours:
            raise ConfigError(
                f"task.template_args.{name} is not an argument of the chat template but one of ours; leave it out."
            )
        if read is not None and name not in read:
            known = sorted(read - ours - set(tokenizer.special_tokens_map))
            near = nearest(name, known, cutoff=0.6)
            hint = f"did you mean {near}?" if near else f"it reads {', '.join(known) or 'no argument'}."
            raise ConfigError(f"task.template_args.{name} is not read by the tokenizer's chat template; {hint}")


def render(
    tokenizer: Any,
    prompts: Sequence[Any],
    places: Sequence[str],
    chat_template: bool | None,
    template_args: dict[str, Any] | None = None,
) -> list[np.ndarray]:
    """Tokenise prompts, each a string, a list of chat messages ``{"role": ..., "content": ...}`` or a `Chat`.

    Messages go through the tokenizer's chat template, with the header of the answer appended. Strings stay as they are, behind
    the beginning-of-sequence token where the tokenizer puts one; with ``chat_template`` they become a user's message.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prompts: what to render.
        places: where each prompt came from, for messages to the user.
        chat_template: ``task.chat_template``.
        template_args: ``task.template_args``.

    Returns:
        int32[P] tokens of every prompt, never empty.

    Raises:
        ConfigError: a prompt that is empty, neither of the two or not Unicode text, no chat template, or one that refuses the
            messages.
    """
    begin, template = _begin(tokenizer), Template(tokenizer, template_args)
    settings = TaskConfig(chat_template=chat_template)
    texts, plain = [], []
    for prompt, place in zip(prompts, places, strict=True):
        chat = prompt if isinstance(prompt, Chat) else read_prompt(prompt, None, settings, place)[0]
        plain.append(isinstance(chat, str))
        texts.append(
            chat if isinstance(chat, str) else template(chat.messages, place, tools=chat.tools, continued=chat.continued)
        )
        _check_unicode(texts[-1], place)
    rows = tokenizer(texts, add_special_tokens=False).input_ids if texts else []
    rendered = []
    for row, is_plain, place in zip(rows, plain, places, strict=True):
        ids = [*begin, *row] if is_plain and row[: len(begin)] != begin else row
        if not ids:
            raise ConfigError(f"{place}: the prompt has no tokens.")
        rendered.append(np.array(ids, dtype=np.int32))
    return rendered


class Replies:
    """Renders an environment's reply to a turn of the policy as the tokens that come before the next turn.

    In plain text the reply is a line of its own. In a chat it is a user's message: the chat template is rendered around a
    stand-in for the turn, and what comes after the stand-in (the end of the policy's turn, the message, the header of the next
    turn) is tokenised alone.
    """

    def __init__(self, tokenizer: Any, chat: bool, template_args: dict[str, Any] | None = None) -> None:
        """Raises ConfigError for a chat without a chat template, or with one that does not repeat what was said."""
        self.tokenizer, self.chat, self.template = tokenizer, chat, Template(tokenizer, template_args if chat else None)
        self.special = special_ids(tokenizer) if chat else frozenset()
        if chat and STAND_IN not in self.template(_exchange(""), "task.chat_template=true"):
            raise ConfigError("task.chat_template=true: the tokenizer's chat template leaves out earlier turns.")

    def __call__(self, text: str, action: np.ndarray) -> np.ndarray:
        """int32[O], tokens that follow ``action`` (int32[A], the sampled turn) when the environment says ``text``."""
        if not self.chat:
            return self._tokens(f"\n{text}\n")
        tokens = self._tokens(self.template(_exchange(text), "a reply").partition(STAND_IN)[2])
        end = next((i for i, token in enumerate(tokens) if int(token) in self.special), 0)  # what ends the policy's turn
        ended = len(action) > 0 and len(tokens) > 0 and action[-1] == tokens[end]
        return tokens[end + 1 :] if ended else tokens

    def _tokens(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer(text, add_special_tokens=False).input_ids, dtype=np.int32)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that no text is made of: those that were added to the vocabulary, among them all special ones."""
    return frozenset(tokenizer.all_special_ids) | frozenset(tokenizer.added_tokens_decoder)


def _exchange(text: str) -> list[dict[str, Any]]:
    said = [("user", "play"), ("assistant", STAND_IN), ("user", text)]
    return [{"role": role, "content": content} for role, content in said]


def _begin(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text: its beginning-of-sequence token or nothing."""
    first = tokenizer("a").input_ids[:1]
    return first if tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id] else []


def _check_unicode(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(text[error.start]):04x}"
        raise ConfigError(f"{place}: the prompt is not Unicode text: it has half of a surrogate pair ({code}).") from None
