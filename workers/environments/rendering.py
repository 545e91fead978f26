"""From a prompt (text or chat messages) to tokens, what an environment says between turns, and which tokens end an answer.

Where prompts come from is not here. What the policy sampled is never rendered: it stays the tokens that it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlframe.config import ConfigError

_STAND_IN = "WHAT-THE-POLICY-SAID"


def stop_token_ids(tokenizer: Any) -> tuple[int, ...]:
    """The tokenizer's end of sequence, and what the model folder's ``generation_config.json`` adds (the end of a chat turn).

    Raises:
        ConfigError: there is none.
    """
    found = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    folder = Path(str(tokenizer.name_or_path))
    if (folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        more = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
        found += [int(token) for token in (more if isinstance(more, list) else [more]) if token is not None]
    if not found:
        raise ConfigError(f"The tokenizer of {folder} has no end-of-sequence token, so no answer would ever end.")
    return tuple(dict.fromkeys(found))


def render(tokenizer: Any, prompts: Sequence[Any], places: Sequence[str], chat_template: bool | None) -> list[np.ndarray]:
    """Tokenise prompts, each a string or a list of chat messages ``{"role": ..., "content": ...}``.

    Messages go through the tokenizer's chat template, with the header of the answer appended. Strings stay as they are, behind
    the beginning-of-sequence token where the tokenizer puts one; with ``chat_template`` they become a user's message.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prompts: what to render.
        places: where each prompt came from, for messages to the user.
        chat_template: ``task.chat_template``.

    Returns:
        int32[P] tokens of every prompt, never empty.

    Raises:
        ConfigError: a prompt that is empty or neither of both, no chat template, or one that refuses the messages.
    """
    begin = _begin(tokenizer)
    texts, plain = [], []
    for prompt, place in zip(prompts, places, strict=True):
        if not prompt or (isinstance(prompt, str) and not prompt.strip()):
            raise ConfigError(f"{place}: the prompt is empty.")
        is_text = isinstance(prompt, str)
        if not is_text and chat_template is False:
            raise ConfigError(f"{place}: the prompt is a list of chat messages, and task.chat_template=false forbids them.")
        plain.append(is_text and not chat_template)
        if plain[-1]:
            texts.append(prompt)
        else:
            messages = [{"role": "user", "content": prompt}] if is_text else prompt
            texts.append(_chat(tokenizer, messages, place))
    rows = tokenizer(texts, add_special_tokens=False).input_ids if texts else []
    rendered = []
    for row, is_plain, place in zip(rows, plain, places, strict=True):
        ids = [*begin, *row] if is_plain and row[: len(begin)] != begin else row
        if not ids:
            raise ConfigError(f"{place}: the prompt has no tokens.")
        rendered.append(np.array(ids, dtype=np.int32))
    return rendered


class Replies:
    """What an environment says after a turn of the policy, as the tokens that come before the next turn.

    In plain text the reply is a line of its own. In a chat it is a user's message: the chat template is rendered around a
    stand-in for the turn, and what comes after the stand-in (the end of the policy's turn, the message, the header of the next
    turn) is tokenised alone.
    """

    def __init__(self, tokenizer: Any, chat: bool) -> None:
        """Raises ConfigError for a chat without a chat template, or with one that does not repeat what was said."""
        self.tokenizer, self.chat = tokenizer, chat
        if chat and _STAND_IN not in _chat(tokenizer, _exchange(""), "task.chat_template=true"):
            raise ConfigError("task.chat_template=true: the tokenizer's chat template leaves out earlier turns.")

    def __call__(self, text: str, action: np.ndarray) -> np.ndarray:
        """int32[O], tokens that follow ``action`` (int32[A], the sampled turn) when the environment says ``text``."""
        if not self.chat:
            return self._tokens(f"\n{text}\n")
        tokens = self._tokens(_chat(self.tokenizer, _exchange(text), "a reply").partition(_STAND_IN)[2])
        ended = len(action) > 0 and len(tokens) > 0 and action[-1] == tokens[0]
        return tokens[1:] if ended else tokens

    def _tokens(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer(text, add_special_tokens=False).input_ids, dtype=np.int32)


def _exchange(text: str) -> list[dict[str, str]]:
    said = [("user", "play"), ("assistant", _STAND_IN), ("user", text)]
    return [{"role": role, "content": content} for role, content in said]


def _begin(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text: its beginning-of-sequence token or nothing."""
    first = tokenizer("a").input_ids[:1]
    return first if tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id] else []


def _chat(tokenizer: Any, messages: Any, place: str) -> str:
    if tokenizer.chat_template is None:
        raise ConfigError(f"{place}: the prompt is a chat, but the model's tokenizer has no chat template; use plain strings.")
    good = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
    if not good:
        raise ConfigError(f'{place}: the prompt is neither a string nor a list of messages {{"role": ..., "content": ...}}.')
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates are programs of the model's authors and raise what they like
        raise ConfigError(f"{place}: the tokenizer's chat template refuses the messages: {error}.") from None
