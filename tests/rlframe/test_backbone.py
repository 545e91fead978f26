"""Backbones of many architectures: packed trajectories get the logits that the plain model gives each alone."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlframe.attention import Segments
from rlframe.config import ConfigError
from rlframe.losses.base import LossInputs, LossOutputs
from tests.support.session_cases import SHAPE, Policy, load, make_batch, spec

MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "head_dim": None}
GATED_DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
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
    "deepseek_v3": {
        **MLA,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 1,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": {
        **EXPERTS,
        **GATED_DELTA,
        "shared_expert_intermediate_size": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "gpt_oss": {"num_local_experts": 4},
}
ALONE = ("lfm2", "qwen3_next", "gpt_oss")
"""They do not keep packed trajectories apart: state is carried over, or positions are not looked at."""


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


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_trajectories_get_the_plain_models_logits(name: str, tmp_path, caplog) -> None:
    folder = str(tmp_path)
    write(name, folder)
    kernel = "eager" if name == "gpt_oss" else "sdpa"
    with caplog.at_level(logging.WARNING, "rlframe.backbone"):
        backbone = load(folder, None, attn_implementation=kernel)
    assert backbone.packs == (name not in ALONE)
    assert ("does not keep packed trajectories apart" in caplog.text) == (name in ALONE)
    session = backbone.create_session("a", spec())
    batch = make_batch()
    mine = session.forward(batch, FinalLogits(), 1000).per_token["logits"]
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        reference = torch.cat([plain(torch.from_numpy(t.tokens.astype("int64"))[None]).logits[0] for t in batch])
    torch.testing.assert_close(mine, reference, atol=2e-5, rtol=1e-4)
    session.forward_backward(batch, Policy(), 1000)
    assert session.optim_step(0.1)["grad_norm"] > 0


def test_a_head_that_losses_would_get_wrong_is_refused(tmp_path) -> None:
    write("roberta", str(tmp_path), is_decoder=True, type_vocab_size=1, num_key_value_heads=None)
    with pytest.raises(ConfigError, match="changes its logits after the LM head"):
        load(str(tmp_path), None)


def test_an_attention_implementation_that_a_model_lacks_is_refused(tmp_path) -> None:
    write("gpt_oss", str(tmp_path))
    assert load(str(tmp_path), None).model.config._attn_implementation == "eager"  # where sdpa is asked for, and lacking
    with pytest.raises(ConfigError, match="try eager"):
        load(str(tmp_path), None, attn_implementation="flash_attention_2")


def dense_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], window: int | None) -> Tensor:
    """[1, N, heads, D] by the formula."""
    total = sum(lengths)
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    behind = torch.arange(total)[:, None] - torch.arange(total)[None]
    seen = (owner[:, None] == owner[None]) & (behind >= 0) & (behind < (window or total))
    scores = 0.3 * query @ key.repeat_interleave(2, 1).transpose(-1, -2)
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [9, 1, 3, 17, 4, 2, 16]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_attention_within_segments_equals_the_dense_formula(lengths: list[int], window: int | None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, heads, sum(lengths), 6) for heads in (4, 2, 2)]
    inputs = [torch.randn(size, dtype=torch.float64, generator=generator).to(dtype).requires_grad_() for size in sizes]
    segments = Segments()
    segments.describe(np.array(lengths), torch.device("cpu"))
    out = segments.attend(*inputs, scale=0.3, window=window)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    dense = dense_attention(*doubles, lengths, window)
    weights = torch.randn(dense.shape, dtype=torch.float64, generator=generator).to(dtype)
    mine = torch.autograd.grad((out * weights).sum(), inputs)
    reference = torch.autograd.grad((dense * weights.double()).sum(), doubles)
    # Short bfloat16 trajectories are rounded once, at the end; attention in bfloat16 would be off by several units.
    rtol, atol = (2**-8, 1e-5) if dtype == torch.bfloat16 else (None, None)
    for a, b in zip((out, *mine), (dense, *reference), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=atol)
