"""Which tokens end an answer. See `workers.environments.rendering` for how prompts are rendered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlframe.config import ConfigError
from workers.environments.rendering import STAND_IN, Template, special_ids

MODEL_FILES = ("generation_config.json", "config.json")
"""Files of a model's folder that may name ends of sequences (``eos_token_id``)."""


def stop_token_ids(
    tokenizer: Any, stop: Sequence[str | int] = (), template_args: dict[str, Any] | None = None
) -> tuple[int, ...]:
    """Every token that ends a turn of the policy, the tokenizer's end of sequence first.

    They are: the tokenizer's end of sequence, those that the model's folder names, the token with which the chat template ends
    a message of the assistant, and ``stop``.

    Args:
        tokenizer: a Hugging Face tokenizer.
        stop: ``task.stop``, texts or numbers of single tokens.
        template_args: ``task.template_args``.

    Raises:
        ConfigError: there is no stop token, or an item of ``stop`` is not one token.
    """
    own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    folder = Path(str(tokenizer.name_or_path))
    turn = end_of_turn(tokenizer, template_args or {})
    wanted = [_single(tokenizer, item) for item in stop]
    found = [token for token in (*own, *_named_by(folder), turn, *wanted) if token is not None]
    stops = tuple(dict.fromkeys(token for token in found if 0 <= token < len(tokenizer)))
    if not stops:
        raise ConfigError(
            f"The tokenizer of {folder} has no end-of-sequence token, so no answer would ever end; name one with task.stop."
        )
    return stops


def end_of_turn(tokenizer: Any, template_args: dict[str, Any]) -> int | None:
    """The first special token that the chat template writes after what the assistant said; None where it writes none."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    template = Template(tokenizer, template_args)
    said = [{"role": "user", "content": "play"}, {"role": "assistant", "content": STAND_IN}]
    try:
        behind = template(said, "the end of a turn", header=False).partition(STAND_IN)[2]
    except ConfigError:  # a template for other conversations than this one; the prompts will show whether it can be used
        return None
    special = special_ids(tokenizer)
    return next((token for token in tokenizer(behind, add_special_tokens=False).input_ids if token in special), None)


def response(tokenizer: Any, action: np.ndarray, finish: str, stops: Sequence[int]) -> str:
    """The text of a turn (int32[A]) without special tokens and without the token that ended it."""
    ended = finish == "stop" and len(action) > 0 and int(action[-1]) in stops
    return tokenizer.decode(action[:-1] if ended else action, skip_special_tokens=True)


def _named_by(folder: Path) -> list[int]:
    """``eos_token_id`` of the model's files, also of the text part of a multimodal model."""
    found: list[int] = []
    for name in MODEL_FILES:
        try:
            settings = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # not a folder, or a file that the model's own loader will refuse
        for part in (settings, settings.get("text_config") if isinstance(settings, dict) else None):
            value = part.get("eos_token_id") if isinstance(part, dict) else None
            found += [v for v in (value if isinstance(value, list) else [value]) if type(v) is int]
    return found


def _single(tokenizer: Any, item: str | int) -> int:
    """The number of one item of ``task.stop``."""
    size = len(tokenizer)
    if isinstance(item, int):
        if not 0 <= item < size:
            raise ConfigError(f"task.stop has {item}, but the tokenizer has the tokens 0 to {size - 1}.")
        return item
    vocabulary = tokenizer.get_vocab()
    if item in vocabulary:
        return int(vocabulary[item])
    ids = tokenizer(item, add_special_tokens=False).input_ids
    if len(ids) == 1 and ids[0] != tokenizer.unk_token_id:
        return int(ids[0])
    what = f"{len(ids)} tokens" if len(ids) > 1 else "no token"
    raise ConfigError(
        f"task.stop has {item!r}, which is {what} of this tokenizer; a stop is one token, given by its text or its number."
    )
