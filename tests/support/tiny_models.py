"""Tiny models of many architectures, with every part that makes them special, written to folders."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlframe.losses.base import LossInputs, LossOutputs
from tests.support.session_cases import SHAPE

MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "head_dim": None}
GATED_DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
DEEPSEEK_V3 = {
    **MLA,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
}
ARCHITECTURES = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 4},
    "cohere": {},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 2.0},
    "phi3": {},
    "olmo2": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": DEEPSEEK_V3,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": {
        **EXPERTS,
        **GATED_DELTA,
        "shared_expert_intermediate_size": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "gpt_oss": {"num_local_experts": 4},
}
"""Architecture -> what it needs beside `SHAPE`."""


class FinalLogits:
    needs = "lm_head"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        head = inputs.lm_head
        logits = (inputs.hidden @ head.weight.T + (0 if head.bias is None else head.bias)) * head.scale
        return LossOutputs(
            loss=None, per_token={"logits": head.softcap * torch.tanh(logits / head.softcap) if head.softcap else logits}
        )


def write(name: str, folder: str, **options) -> None:
    options = {**SHAPE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **ARCHITECTURES.get(name, {}), **options}
    config = AutoConfig.for_model(name, **{key: value for key, value in options.items() if value is not None})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
