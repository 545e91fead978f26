"""Whether the model has the tokens of an environment's prompts and stops; checked before a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlframe.config import ConfigError
from workers.environments.base import Problem


def check_problems(problems: Iterable[Problem], stops: Sequence[int], vocab_size: int, tokenizer: Any) -> None:
    """Refuse prompts and stop tokens that the model cannot read or write.

    Args:
        problems: training and held-out problems.
        stops: `Environment.stop_token_ids`.
        vocab_size: rows of the model's embedding.
        tokenizer: a Hugging Face tokenizer, which messages spell tokens with.

    Raises:
        ConfigError: one sentence that names the row, or the prompt, and the token.
    """
    for problem in problems:
        where = problem.payload.get("place") or f"The prompt {problem.id}"
        fault = token_fault(problem.tokens, vocab_size)
        if fault is not None:
            known = isinstance(fault, int) and fault >= 0 and tokenizer.convert_ids_to_tokens(fault)
            written = f" (the tokenizer's {known!r})" if known else ""
            raise ConfigError(
                f"{where} has {_described(fault)}{written}, but the model's vocabulary has {vocab_size} entries; use the "
                "tokenizer that the model was trained with, or leave the prompt out."
            )
        if not len(problem.tokens):
            raise ConfigError(f"{where} has no tokens; leave it out.")
    if stops and not any(0 <= token < vocab_size for token in stops):
        spelled = tokenizer.convert_ids_to_tokens(stops[0])
        raise ConfigError(
            f"The stop token {stops[0]} (the tokenizer's {spelled!r}) is beyond the model's vocabulary of {vocab_size} "
            "entries, so no answer would ever end; use the tokenizer that the model was trained with."
        )


def token_fault(tokens: np.ndarray, vocab_size: int) -> int | str | None:
    """The first of ``tokens`` outside of [0, vocab_size), or a type or shape that is not token ids; None: all is well."""
    array = np.asarray(tokens)
    if array.size and array.dtype.kind not in "iu":
        return f"{array.dtype} values"
    if array.ndim != 1:
        return f"an array of shape {array.shape}"
    outside = (array < 0) | (array >= vocab_size)
    return int(array[np.argmax(outside)]) if outside.any() else None


def _described(fault: int | str) -> str:
    return f"the token {fault}" if isinstance(fault, int) else f"{fault} instead of token ids"
