"""Models are run as transformers runs them, alone and packed, or refused: known traps, each against eager attention."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rlframe import exactness
from rlframe.config import ConfigError
from rlframe.exactness import examine
from rlframe.hf_checkpoint import to_module_names
from rlframe.model_setup import materialise
from rlframe.small_copy import small_copies
from tests.support.session_cases import load, make_batch, spec
from tests.support.tiny_models import DEEPSEEK_V3, EXPERTS, GATED_DELTA, FinalLogits, write

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.0, 1.0, 1.0],
    "long_factor": [8.0, 4.0, 2.0, 1.0],
    "original_max_position_embeddings": 8,
}


def window(size: int) -> dict[str, int]:
    """Qwen2-MoE slides in every other layer *below* ``max_window_layers`` (dense Qwen2: above)."""
    return {"use_sliding_window": True, "sliding_window": size, "max_window_layers": 2}


TRAPS = {
    # name of the case: (architecture, options, lengths of the trajectories, whether they may share a pass)
    "convolutions carry state over": ("lfm2", {"layer_types": ["conv", "full_attention"]}, (7, 9), False),
    "gated delta nets carry state over": (
        "qwen3_5_text",
        {**GATED_DELTA, "layer_types": ["linear_attention", "full_attention"]},
        (7, 9),
        False,
    ),
    "chunks follow the row": (
        "llama4_text",
        {"attention_chunk_size": 10, "num_local_experts": 2, "intermediate_size_mlp": 40, "floor_scale": 4},
        (9, 9),
        False,
    ),
    "frequencies follow the longest": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8, "max_position_embeddings": 64},
        (8, 9),
        False,
    ),
    "frequencies grow and stay": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, "max_position_embeddings": 8},
        (30, 12, 5),
        False,
    ),
    "frequencies of some layers grow and stay": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "layer_types": ["sliding_attention", "full_attention"],
            "max_position_embeddings": 8,
        },
        (30, 12, 5),
        False,
    ),
    "a window of 2 only in the mask": (
        "qwen2_moe",
        {**EXPERTS, "shared_expert_intermediate_size": 8, **window(2)},
        (5, 3),
        True,
    ),
    "a window of 6 only in the mask": (
        "qwen2_moe",
        {**EXPERTS, "shared_expert_intermediate_size": 8, **window(6)},
        (20, 4),
        True,
    ),
    "a cap under another name": (
        "recurrent_gemma",
        {"logits_soft_cap": 30.0, "lru_width": 32, "attention_window_size": 6, "block_types": ["recurrent", "attention"]},
        (9, 8),
        False,
    ),
    "logits multiplied, not divided": ("hyperclovax", {"logits_scaling": 3.0}, (9, 8), True),
    "hidden states divided before the head": ("minicpm3", {"dim_model_base": 8, "q_lora_rank": 8, "kv_lora_rank": 8,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "head_dim": None, "num_key_value_heads": 4},
        (9, 8), True),
    "multipliers in buffers": (
        "falcon_h1",
        {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8,
         "ssm_multipliers": [0.5, 2.0, 1.5, 0.7, 1.2], "lm_head_multiplier": 0.4},
        (11, 8),
        False,
    ),
}  # fmt: skip
TARGETS = {"phi3": ["qkv_proj"], "minicpm3": ["q_a_proj"]}
"""An untrained adapter on something: the adapter is not the subject."""


@pytest.mark.parametrize("case", TRAPS)
def test_log_probabilities_are_those_of_eager_transformers(case: str, tmp_path) -> None:
    name, options, lengths, packs = TRAPS[case]
    write(name, str(tmp_path), **options)
    backbone = load(str(tmp_path), None)
    assert backbone.packs == packs
    batch = make_batch(list(lengths))
    logits = (
        backbone.create_session("a", spec(lora={"targets": TARGETS.get(name, ["q_proj"])}))
        .forward(batch, FinalLogits(), 1000)
        .per_token["logits"]
    )
    plain = AutoModelForCausalLM.from_pretrained(str(tmp_path), attn_implementation="eager").eval()
    with torch.no_grad():
        expected = [copy.deepcopy(plain)(torch.from_numpy(t.tokens.astype("int64"))[None]).logits[0] for t in batch]
    torch.testing.assert_close(logits.log_softmax(-1), torch.cat(expected).log_softmax(-1), atol=1e-4, rtol=0)


BUFFERS = {
    "llama": {},
    "falcon_h1": TRAPS["multipliers in buffers"][1],
    "gemma3_text": {"sliding_window": 4},
    "gemma3n_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "laurel_rank": 4,
                     "intermediate_size": 40,
                     "activation_sparsity_pattern": None, "num_kv_shared_layers": 0,
                     "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8, "max_position_embeddings": 64},
    "deepseek_v3": DEEPSEEK_V3,
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "num_key_value_heads": None},
    "recurrent_gemma": TRAPS["a cap under another name"][1],
    "qwen3_next": {**EXPERTS, **GATED_DELTA, "shared_expert_intermediate_size": 8,
                   "layer_types": ["linear_attention", "full_attention"]},
    "granite": {},
}  # fmt: skip


@pytest.mark.parametrize("name", BUFFERS)
def test_every_buffer_is_that_of_from_pretrained(name: str, tmp_path) -> None:
    write(name, str(tmp_path), **BUFFERS[name])
    mine = dict(load(str(tmp_path), None).model.named_buffers(remove_duplicate=False))
    theirs = dict(AutoModelForCausalLM.from_pretrained(str(tmp_path)).named_buffers(remove_duplicate=False))
    assert mine.keys() == theirs.keys()
    for buffer, expected in theirs.items():
        torch.testing.assert_close(mine[buffer], expected, rtol=0, atol=0, equal_nan=True, msg=buffer)


def test_a_buffer_that_nothing_fills_is_refused(tmp_path, monkeypatch) -> None:
    write("llama", str(tmp_path))
    monkeypatch.setattr("transformers.modeling_utils.PreTrainedModel.initialize_weights", lambda self: None)
    with pytest.raises(ConfigError, match=r"has a buffer model\.rotary_emb\.inv_freq that no checkpoint holds"):
        load(str(tmp_path), None)


class Unfilled(PreTrainedModel):
    """A model whose buffers nothing fills."""

    config_class = PreTrainedConfig

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        super().__init__(config)
        self.register_buffer("forgotten", torch.ones(2, 3).to(dtype), persistent=False)
        self.register_buffer("stored", torch.ones(2, 3).to(dtype))
        self.post_init()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.complex64])
def test_a_buffer_of_any_type_that_nothing_fills_is_found(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        model = Unfilled(PreTrainedConfig(), dtype)
    with pytest.raises(ConfigError, match="has a buffer forgotten that no checkpoint holds"):
        materialise(model, torch.device("cpu"))


def test_a_tensor_whose_name_a_rule_for_another_hits_is_read() -> None:
    """DeepSeek-V4's rule for the norms of its compressors hits the last norm, too, where a folder has the modules' names."""
    small = next(small_copies(AutoConfig.for_model("deepseek_v4")))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small)
    keys = ["model.norm.weight", "model.layers.0.input_layernorm.weight"]
    assert to_module_names(model, {key: torch.ones(1) for key in keys}).keys() == set(keys)


def test_a_model_that_differs_alone_is_refused_with_the_number(monkeypatch) -> None:
    mine = exactness._logprobs
    monkeypatch.setattr(exactness, "_logprobs", lambda forward, trajectories: mine(forward, trajectories) * (1 + 1e-3))
    config = AutoConfig.for_model("llama", hidden_act="gelu")  # of no other test: verdicts are remembered
    with pytest.raises(ConfigError, match=r"differ by up to 0\.\d+ nats \(allowed: 0\.0001\)"):
        examine(config, "sdpa")


def test_a_number_that_is_not_one_counts_as_a_difference() -> None:
    nan = torch.tensor([0.0, float("nan")])
    assert exactness._worse(0.0, nan, torch.zeros(2)) == np.inf


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3_text", "llama4_text", "qwen3_5_text", "jamba", "gemma4_text"])
def test_a_small_copy_keeps_every_kind_of_layer_and_is_small(name: str) -> None:
    config = AutoConfig.for_model(name)
    before = config.to_dict()
    small = next(small_copies(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small)
    assert sum(p.numel() for p in model.parameters()) < 2e6
    assert set(getattr(small, "layer_types", None) or []) == set(getattr(config, "layer_types", None) or [])
    assert config.to_dict() == before


def test_an_eight_billion_model_is_examined_in_little_memory() -> None:
    config = AutoConfig.for_model(
        "qwen3", hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, vocab_size=151936
    )
    verdict = examine(config, "sdpa")
    assert verdict.packs and verdict.alone < 1e-4 and verdict.packed < 1e-5


@pytest.mark.parametrize(
    ("name", "options", "scale"),
    [
        ("granite", {"hidden_size": 2048, "num_attention_heads": 32, "logits_scaling": 8}, 1 / 8),
        ("granite", {"hidden_size": 2048, "num_attention_heads": 32, "logits_scaling": 3}, 1 / 3),
        ("granite", {"hidden_size": 2048, "num_attention_heads": 32, "logits_scaling": 16.0}, 1 / 16),
        ("cohere", {"logit_scale": 0.0625}, 0.0625),
        (
            "minicpm3",
            {"hidden_size": 2304, "num_attention_heads": 36, "num_hidden_layers": 40, "dim_model_base": 256},
            256 / 2304,
        ),
        ("qwen3", {}, 1.0),
    ],
)
def test_the_scale_of_logits_is_the_models_and_not_the_small_copys(name: str, options: dict, scale: float) -> None:
    """Sizes of the copy equal settings by accident; the scale must be that of the architecture's documentation."""
    assert examine(AutoConfig.for_model(name, **options), "sdpa").final.scale == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("name", ["spda", "flash", "flash_attention", "flash_attention_7", "not_flash_attention_2"])
def test_an_attention_implementation_that_there_is_not_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"attn_implementation={name} is not known; choose sdpa, eager"):
        examine(AutoConfig.for_model("llama"), name)


FLASH = ("flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2", "kernels-community/vllm-flash-attn3")


def test_a_kernel_that_does_not_run_here_is_taken_where_the_same_layout_was_compared() -> None:
    config = AutoConfig.for_model("llama")
    for kernel in FLASH:
        verdict = examine(config, kernel)
        assert (verdict.kernel, verdict.checked, verdict.packs) == (kernel, "rlframe_segments", True)


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flex_attention"])
def test_a_kernel_that_does_not_run_here_is_refused_where_only_eager_is_exact(kernel: str) -> None:
    config = AutoConfig.for_model("gemma2", attn_logit_softcapping=50.0)
    assert examine(config, "sdpa").kernel == "eager"
    with pytest.raises(
        ConfigError, match=rf"={kernel} cannot be compared .* only eager .*; set model.attn_implementation=eager"
    ):
        examine(config, kernel)


def test_a_mask_that_keeps_trajectories_apart_says_nothing_of_flash_kernels() -> None:
    config = AutoConfig.for_model("glm_moe_dsa")  # its selection of tokens needs the mask, which flash kernels do not get
    verdict = examine(config, "sdpa")
    assert verdict.kernel != "rlframe_segments" and verdict.packs
    assert not examine(config, "flash_attention_2").packs
