"""How many tokens a model takes, by its configuration; no engine and no weights are needed to say so."""

from __future__ import annotations

from typing import Any

from rlframe.config import ConfigError

LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""Names that architectures give to their longest context."""
SCALED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of RoPE whose longest context counts the scaling."""


def check_context(max_model_len: int, text_config: Any) -> None:
    """Refuse a context that the model was not made for; by the rule of vLLM, for every engine, since the trainer has no other.

    Args:
        max_model_len: ``rollout.max_model_len``.
        text_config: transformers' configuration of the language model.

    Raises:
        ConfigError: it is longer than `longest_context`, or than the rotary positions stay the same.
    """
    check_rotary_length(max_model_len, text_config)
    longest = longest_context(text_config)
    if longest is not None and max_model_len > longest:
        raise ConfigError(
            f"rollout.max_model_len={max_model_len} is more than the {longest} tokens that the model takes by its config.json "
            "(positions, with the scaling of RoPE); lower it."
        )


def check_rotary_length(max_model_len: int, text_config: Any) -> None:
    """Refuse lengths at which a token's numbers would depend on how many tokens came after it; arguments as in `check_context`.

    Raises:
        ConfigError: it is above the length up to which the frequencies of a dynamic or longrope model stay as they are.
    """
    rope = getattr(text_config, "rope_parameters", None) or {}
    for part in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        name = str(part.get("rope_type"))
        original = part.get("original_max_position_embeddings") or getattr(text_config, "max_position_embeddings", None)
        if ("dynamic" in name or name == "longrope") and original is not None and max_model_len > original:
            raise ConfigError(
                f"rollout.max_model_len={max_model_len}, but this model's rotary positions (rope_type={name}) change for all "
                f"tokens once a sequence is longer than {original}, so that what was sampled is not what is trained on; set "
                f"rollout.max_model_len to at most {original}."
            )


def longest_context(text_config: Any) -> int | None:
    """Most tokens that a model takes by its configuration, the scaling of RoPE included; None: it does not say."""
    lengths = [length for name in LENGTHS if (length := getattr(text_config, name, None)) is not None]
    own = getattr(text_config, "model_max_length", None)
    if not lengths and not own:
        return None
    rope = getattr(text_config, "rope_parameters", None) or {}
    layers = [rope] if "rope_type" in rope else [part for part in rope.values() if isinstance(part, dict)]
    factor = 1.0
    for part in layers:
        if part.get("rope_type") not in SCALED_ALREADY and "gemma3" not in text_config.model_type:
            factor = part.get("factor") or factor
    return max(int((own or min(lengths)) * factor), own or 0)
