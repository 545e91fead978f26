"""The torch engine on architectures that other kernels, or a cache, would get wrong: every number is one eager pass's."""

import asyncio

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlframe.config import ConfigError
from tests.support.engines import alignment_error, prompt_of
from workers.engines.protocol import SamplingParams, WeightUpdate
from workers.engines.torch.engine import TorchEngine

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
ARCHITECTURES = {
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 8},  # soft-capped attention at 50
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "falcon_mamba": {"state_size": 8},  # ignores a cache of the general kind
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},  # has no cache at all
    "phi3": {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 64}, "original_max_position_embeddings": 64},
}
KEEPS_STATES = {"gemma2", "gpt_oss", "lfm2", "phi3"}


def folder_of(name, path):
    config = AutoConfig.for_model(name, **{**SIZES, **ARCHITECTURES[name]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.0 if name == "gemma2" else 0.2)
    model.save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_requests_side_by_side_get_the_numbers_of_eager_passes(name, tmp_path):
    reference = folder_of(name, tmp_path)
    engine = TorchEngine(str(tmp_path), max_model_len=64)
    assert engine._model.keeps_states == (name in KEEPS_STATES)
    prompts = [prompt_of(length, seed=length) for length in (9, 21)]

    async def sample():
        params = SamplingParams(max_new_tokens=12, logprobs=8, seed=0)
        return await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))

    for prompt, completion in zip(prompts, asyncio.run(sample()), strict=True):
        assert alignment_error(reference, prompt, completion, 1.0) < 1e-4


def test_the_cap_of_gemma_2_is_worth_the_eager_kernel(tmp_path):
    """What the test above would see without it."""
    reference = folder_of("gemma2", tmp_path)
    other = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    tokens = torch.from_numpy(prompt_of(24).astype(np.int64))[None]
    with torch.no_grad():
        difference = reference(tokens).logits.log_softmax(-1) - other(tokens).logits.log_softmax(-1)
    assert difference.abs().max() > 0.1


def test_lengths_at_which_rotary_positions_change_are_refused(tmp_path):
    folder_of("phi3", tmp_path)
    with pytest.raises(ConfigError, match=r"set rollout\.max_model_len to at most 64"):
        TorchEngine(str(tmp_path), max_model_len=65)


def test_experts_that_travel_apart_are_put_together(tmp_path):
    options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **{**SIZES, **options})).eval()
    model.save_pretrained(tmp_path / "model")
    engine = TorchEngine(str(tmp_path / "model"), max_model_len=64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    model.save_pretrained(tmp_path / "moved")  # as transformers stores them: one tensor for every expert
    stored = load_file(tmp_path / "moved" / "model.safetensors")
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in stored

    async def run():
        await engine.pause()
        await engine.load_weights(WeightUpdate(1, "full", {name: tensor.numpy() for name, tensor in stored.items()}))
        await engine.resume()
        return await engine.generate(prompt_of(9), SamplingParams(max_new_tokens=12, logprobs=8, seed=0))

    assert alignment_error(model, prompt_of(9), asyncio.run(run()), 1.0) < 1e-4
