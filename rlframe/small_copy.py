"""Shrinks a model configuration but keeps every kind of layer, so that a check of an architecture runs in milliseconds.

Sizes become a few dozen, windows, chunks and original context lengths a few tokens, layers one of each kind. What decides how
numbers are computed (kinds of layers and of rotary embedding, soft caps, multipliers, biases, ties) stays. No weights live
here; see `rlframe.exactness` for how the copy is used.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeGuard, TypeVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel

WINDOW = 6
"""Tokens of a sliding window or chunk in the copy."""
ORIGINAL_LENGTH = 12
"""Original context length of a rotary embedding that changes with the length."""
CONTEXT = 64
"""Positions of the copy; rows of a check are shorter."""
MAX_LAYERS = 12

VOCABULARY = 96
_HEADS, _HEAD_DIM, _HIDDEN, _INNER = 4, 8, 32, 48

_HEAD_COUNTS = (
    "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads encoder_attention_heads "
    "swa_num_attention_heads linear_num_value_heads linear_num_heads num_query_groups"
)
_SIZES = (
    (VOCABULARY, "vocab_size vocab_size_per_layer_input"),
    (
        _HIDDEN,
        "hidden_size d_model n_embd embed_dim embedding_size emb_dim embedding_dim word_embed_proj_dim lru_width "
        "input_embedding_size output_embedding_size attention_hidden_size hc_lowrank ple_embed_dim router_hidden_size",
    ),
    (
        _INNER,
        "intermediate_size ffn_dim d_ff n_inner dff dim_ff ffn_hidden_size feed_forward_size d_inner intermediate_size_mlp "
        "shared_intermediate_size dense_intermediate_size decoder_ffn_dim encoder_ffn_dim",
    ),
    (
        16,
        "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size "
        "dim_model_base",
    ),
    (_HEADS, _HEAD_COUNTS),
    (
        _HEAD_DIM,
        "head_dim kv_channels attention_head_dim attention_head_size dim_head d_head swa_head_dim linear_head_dim "
        "qk_nope_head_dim v_head_dim q_lora_rank kv_lora_rank index_head_dim linear_key_head_dim linear_value_head_dim "
        "hidden_size_per_layer_input laurel_rank state_size ssm_state_size mamba_d_state mamba_d_head mamba_head_dim "
        "mamba_headdim mamba_n_heads mamba_num_heads o_lora_rank d_rel gated_norm_rank adapter_rank",
    ),
    (4, "qk_rope_head_dim rotary_dim mamba_dt_rank"),
    (2, "linear_num_key_heads mamba_n_groups n_groups"),
    (64, "mamba_d_ssm"),
    (16, "index_n_heads"),  # with few, all scores of an indexer may be 0, and which tokens it takes is an accident
)
_EXPERTS = "num_experts num_local_experts n_routed_experts moe_num_experts"
_CHOSEN = "num_experts_per_tok num_experts_per_token top_k_experts moe_topk moe_k"
_KEY_VALUE_HEADS = "num_key_value_heads num_kv_heads swa_num_key_value_heads"
_LAYERS = "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers"
_WINDOWS = (
    "sliding_window attention_window_size attention_chunk_size window_size sliding_window_size local_attention "
    "chunk_size mamba_chunk_size block_size floor_scale index_topk indexer_budget keep_window_size"
)
_BLOCKS = "index_block_size index_kpool indexer_compress_ratio"
"""Tokens that a sparse attention selects together, or compresses into one."""
_SELECTED, _BLOCK = "index_topk_blocks", 3
_LAYER_NUMBERS = "moe_layers full_attn_idxs hybrid_layer_ids cross_attention_layers"
_CONTEXTS = "max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length"
_PERIODS = ("_interval", "_period", "_pattern", "_frequency", "_freq", "sparse_step", "layer_step", "_offset")


MOST_PARAMETERS = 2e8
"""A copy above this is not built."""
T = TypeVar("T")


@dataclass(frozen=True)
class Keyed:
    """A configuration, and whatever goes with it, as the key of a cache; equal where ``key`` is."""

    key: str
    config: Any = field(compare=False)
    kind: Any = field(default=None, compare=False)

    @classmethod
    def of(cls, config: PreTrainedConfig, kind: Any = None) -> Keyed:
        """By the configuration's contents, and the name of the class ``kind``."""
        name = getattr(kind, "__qualname__", None)
        return cls(json.dumps([name, config.to_dict()], sort_keys=True, default=str), config, kind)


class NoCopy(Exception):
    """No small copy can be built and run; the message is the last reason, to stand in parentheses."""


def first_that_runs(
    config: PreTrainedConfig,
    build: Callable[[PreTrainedConfig], PreTrainedModel],
    run: Callable[[PreTrainedModel], T],
    most: float = MOST_PARAMETERS,
) -> tuple[PreTrainedConfig, PreTrainedModel, T]:
    """The first small copy that ``build`` builds and ``run`` runs, its model, and what ``run`` returned.

    Raises:
        NoCopy: there is none of at most ``most`` parameters.
    """
    reason = "no smaller configuration of it is valid"
    for small in small_copies(config):
        try:
            with torch.device("meta"):
                count = sum(parameter.numel() for parameter in build(small).parameters())
            if count > most:
                reason = f"its smallest copy has {count / 1e6:.0f} million parameters"
                continue
            model = build(small)
            return small, model, run(model)
        except Exception as error:  # architectures fail in their own ways; the last reason is reported
            reason = str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")
    raise NoCopy(reason)


Fields = dict[str, Any]
"""A configuration as its ``to_dict`` gives it."""


def small_copies(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Copies of ``config`` to try in turn, the smallest first; see `first_that_runs`.

    A step that does not fit the configuration skips its copy. The original is not changed.
    """
    for steps in (
        (_shrink_layers, _shrink_lengths, _shrink_sizes),
        (_shrink_layers, _shrink_lengths, _shrink_vocabulary),
        (_shrink_layers, _shrink_vocabulary),
    ):
        fields = copy.deepcopy(config.to_dict())
        text = _text_fields(config, fields)
        try:
            for step in steps:
                step(text)
            for owner in (fields, text):
                _no_special_tokens(owner)
            for part in fields.values():
                if isinstance(part, dict) and part is not text:  # towers for images and sound
                    _put(part, _LAYERS + " depth num_blocks", 1)
                    _put(part, "intermediate_size", _INNER)
            small = type(config).from_dict(fields)
        except Exception:  # configurations validate themselves, each in its own way
            continue
        small._name_or_path = config._name_or_path
        yield small


def _text_fields(config: PreTrainedConfig, fields: Fields) -> Fields:
    """The part of ``fields`` that describes the language model."""
    text = config.get_text_config()
    if text is config:
        return fields
    return next(value for key, value in fields.items() if getattr(config, key, None) is text)


def _no_special_tokens(fields: Fields) -> None:
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if fields.get(name) is not None:
            fields[name] = 0


def _is_size(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _put(fields: Fields, names: str, size: int) -> None:
    """Lower the sizes ``names`` to ``size``, one for all layers or one of each."""
    for name in names.split():
        value = fields.get(name)
        if _is_size(value) and value > size:
            fields[name] = size
        elif isinstance(value, list) and value and all(map(_is_size, value)):
            fields[name] = [min(each, size) for each in value]


def _first(fields: Fields, names: str) -> int | None:
    return next((fields[name] for name in names.split() if _is_size(fields.get(name))), None)


def _shrink_vocabulary(fields: Fields) -> None:
    _put(fields, "vocab_size vocab_size_per_layer_input", VOCABULARY)


def _shrink_sizes(fields: Fields) -> None:
    heads = _first(fields, _HEAD_COUNTS)
    for name in _KEY_VALUE_HEADS.split():
        value = fields.get(name)
        if _is_size(value) and heads:
            fields[name] = 1 if value == 1 else _HEADS if value >= heads else _HEADS // 2
    # DeepSeek's head_dim is another name of the rotated part.
    wide = fields.get("attention_hidden_size") == 2 * (fields.get("hidden_size") or 0)  # Zamba attends to two states at once
    rotated = fields.get("head_dim") is not None and fields.get("head_dim") == fields.get("qk_rope_head_dim")
    for size, names in _SIZES:
        _put(fields, names, size)
    if wide:
        fields["attention_hidden_size"] = 2 * _HIDDEN
        fields["attention_head_dim"] = 2 * _HIDDEN // _HEADS
    if "state_size" in fields and "num_heads" in fields and "head_dim" in fields:  # Mamba 2
        fields["num_heads"] = int(fields.get("expand", 2)) * _HIDDEN // _HEAD_DIM
    if rotated:
        fields["head_dim"] = fields["qk_rope_head_dim"]
    if fields.get("qk_head_dim"):
        fields["qk_head_dim"] = fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]
    _put(fields, _EXPERTS, 4)
    _put(fields, _CHOSEN, 2)
    if (fields.get("n_group") or 1) > 1:
        fields["n_group"], fields["topk_group"] = 2, 1
    for overrides in (fields.get("per_layer_config") or {}).values():
        _put(overrides, " ".join(overrides), 2 * _HEAD_DIM)
    for nested in ("attn_config", "ffn_config"):
        if isinstance(inner := fields.get(nested), dict):
            _shrink_sizes(inner)
            _put(inner, "kv_n_heads moe_top_k", 2)
    width = _rotary_width(fields)
    for rope in _ropes(fields):
        for key in ("short_factor", "long_factor"):
            if isinstance(rope.get(key), list):
                rope[key] = rope[key][:: max(1, len(rope[key]) // width)][:width]
        if isinstance(sections := rope.get("mrope_section"), list):
            rope["mrope_section"] = [width - 2 * (width // 3), width // 3, width // 3][: len(sections)]


def _rotary_width(fields: Fields) -> int:
    """Frequencies of the rotary embedding: half of the rotated part of a head."""
    dim = fields.get("qk_rope_head_dim") or fields.get("head_dim")
    dim = dim or (fields.get("hidden_size") or _HIDDEN) // (fields.get("num_attention_heads") or 1)
    rope = next(_ropes(fields), {})
    factor = rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    return max(1, int(dim * factor) // 2)


def _ropes(fields: Fields) -> Iterator[Fields]:
    """The parameters of the rotary embeddings: one for all layers, or one of each kind of layer."""
    parameters = fields.get("rope_parameters")
    if isinstance(parameters, dict):
        yield from [each for each in parameters.values() if isinstance(each, dict)] or [parameters]


def _shrink_lengths(fields: Fields) -> None:
    _put(fields, _WINDOWS, WINDOW)
    # A sparse attention selects fewer tokens than a row has; one that would take them all is not what runs on long rows.
    _put(fields, _BLOCKS, _BLOCK)
    _put(fields, _SELECTED, WINDOW // _BLOCK)
    if isinstance(rates := fields.get("compress_rates"), dict):
        _put(rates, " ".join(rates), _BLOCK)
    _put(fields, _CONTEXTS, CONTEXT)
    for rope in _ropes(fields):
        kind = rope.get("rope_type", "default")
        if "original_max_position_embeddings" in rope:
            rope["original_max_position_embeddings"] = ORIGINAL_LENGTH
        if kind == "dynamic":
            fields["max_position_embeddings"] = ORIGINAL_LENGTH
    _put(fields, "original_max_position_embeddings", ORIGINAL_LENGTH)


def _shrink_layers(fields: Fields) -> None:
    """Keep one layer of each kind, in order; where kinds follow from a period, a prefix that holds one period and a bit."""
    count = _first(fields, _LAYERS)
    if count is None:
        return
    if isinstance(kinds := fields.get("attention_types"), list) and kinds:  # GPT-Neo: [[kinds, repetitions], ...]
        fields["attention_types"], fields["attention_layers"] = [[kinds[0][0], 1]], list(kinds[0][0])
        _put(fields, _LAYERS, len(kinds[0][0]))
        return
    lists = {name: value for name, value in fields.items() if isinstance(value, (list, tuple)) and len(value) == count}
    overrides = {int(layer): value for layer, value in (fields.get("per_layer_config") or {}).items()}
    periods = [v for k, v in fields.items() if _is_size(v) and any(part in k for part in _PERIODS) and 1 < v < count]
    if periods and not lists:
        keep = list(range(min(count, max(periods) + 1, MAX_LAYERS)))
    else:
        seen: dict[str, int] = {}
        for i in range(count):
            seen.setdefault(repr([[values[i] for values in lists.values()], overrides.get(i)]), i)
        keep = sorted(seen.values())[:MAX_LAYERS]
        if len(keep) < 2 <= count:
            keep = sorted({*keep, count - 1 if 0 in keep else 0})
    for name, values in lists.items():
        fields[name] = [values[i] for i in keep]
    for name in _LAYER_NUMBERS.split():
        if isinstance(fields.get(name), list) and (name not in lists or name == "moe_layers"):
            numbers: list[int] = fields[name] if name not in lists else list(lists[name])
            fields[name] = [keep.index(i) for i in numbers if i in keep] or [len(keep) - 1]
    if overrides:
        fields["per_layer_config"] = {str(keep.index(i)): value for i, value in overrides.items() if i in keep}
    _put(fields, _LAYERS, len(keep))
    _put(fields, "first_k_dense_replace max_window_layers moe_layer_end_index num_kv_shared_layers", 1)
