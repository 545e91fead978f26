"""Which modules mix tokens, compared with what they do: a module mixes if a token's output feels the token before it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlframe.config import ConfigError
from rlframe.model_setup import blocks
from rlframe.token_mixers import ALL_ATTENTION, token_mixers
from tests.support.session_cases import SHAPE, Value, load, make_batch, spec
from tests.support.tiny_models import EXPERTS, GATED_DELTA, MLA

MIXTURE = {**EXPERTS, "shared_expert_intermediate_size": 8}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], **GATED_DELTA}
ARCHITECTURES = {
    "llama": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_neox": {},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "head_dim": None},
    "bloom": {"n_layer": 2, "n_head": 4},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 32},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "qwen3_moe": MIXTURE,
    "qwen3_next": {**MIXTURE, **HYBRID},
    "qwen3_5_text": HYBRID,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8},
    "recurrent_gemma": {"lru_width": 32, "block_types": ["recurrent", "attention"], "num_hidden_layers": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
    "longcat_flash": {
        "num_layers": 2,
        "ffn_hidden_size": 16,
        "expert_ffn_hidden_size": 8,
        "n_routed_experts": 4,
        "moe_topk": 2,
        "zero_expert_num": 1,
        **MLA,
        "head_dim": 4,
        "num_key_value_heads": 4,
    },
}


def tiny(name: str) -> PreTrainedModel:
    options = {**SHAPE, "pad_token_id": 0, **ARCHITECTURES[name]}
    config = AutoConfig.for_model(name, **{key: value for key, value in options.items() if value is not None})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    return model


def parts(module: nn.Module) -> list[nn.Module]:
    """The parts of a block that are called on hidden states and have parameters."""
    found = []
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            found += parts(child)
        elif any(True for _ in child.parameters()):
            found.append(child)
    return found


def first(output: object) -> Tensor:
    return output if isinstance(output, Tensor) else first(next(iter(output)))


@torch.no_grad()
def feels_the_token_before(module: nn.Module, args: tuple, kwargs: dict) -> bool:
    """Whether the output for the last token changes when the input for the one before it does."""
    key = 0 if args else next(name for name, value in kwargs.items() if isinstance(value, Tensor) and value.ndim == 3)
    hidden = args[0] if args else kwargs[key]
    flat = hidden.ndim == 2
    changed = hidden.clone()
    changed[(-2,) if flat else (0, -2)] += torch.linspace(-1, 1, hidden.shape[-1])
    outputs = []
    for x in (hidden, changed):
        called = (x, *args[1:]) if args else args
        outputs.append(first(module(*called, **(kwargs if args else {**kwargs, key: x}))))
    last = (-1,) if outputs[0].ndim == 2 else (0, -1)
    return not torch.allclose(outputs[0][last], outputs[1][last], atol=1e-6)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_they_are_the_modules_whose_output_feels_other_tokens(name: str) -> None:
    model = tiny(name)
    paths = {module: path for path, module in model.named_modules()}
    calls: dict[nn.Module, tuple] = {}
    for block in blocks(model):
        for part in parts(block):
            part.register_forward_pre_hook(
                lambda module, args, kwargs: calls.setdefault(module, (args, kwargs)) and None, with_kwargs=True
            )
    with torch.no_grad():
        model(input_ids=torch.arange(3, 9)[None], use_cache=False)
    assert calls
    mixing = {paths[module] for module, called in list(calls.items()) if feels_the_token_before(module, *called)}
    named = token_mixers(model)
    assert mixing == {paths[module] for module in calls} & set(named)
    assert all(any(path == outer or path.startswith(f"{outer}.") for outer in mixing) for path in named)


def test_a_part_that_is_not_known_is_refused_by_name() -> None:
    class Surprise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 2))

    model = tiny("llama")
    model.model.layers[1].extra = Surprise()
    with pytest.raises(ConfigError, match=r"whether model\.layers\.1\.extra \(Surprise\) of LlamaForCausalLM mixes tokens"):
        token_mixers(model)

    class RetainingBlock(nn.Module):
        """Attention written out in a block: nothing in it has a telling name."""

        def __init__(self) -> None:
            super().__init__()
            self.keys, self.queries = nn.Linear(2, 2), nn.Linear(2, 2)

    model.model.layers[1].extra = RetainingBlock()
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.extra \(RetainingBlock\)"):
        token_mixers(model)
    model.model.layers[1].extra = nn.LayerNorm(32)
    assert token_mixers(model) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_session_with_frozen_attention_moves_everything_else(kind: str, tmp_path) -> None:
    """On a hybrid, where ``self_attn`` would freeze half of the blocks."""
    tiny("qwen3_next").save_pretrained(tmp_path)
    backbone = load(str(tmp_path), None, trainable=kind == "full")
    session = backbone.create_session("critic", spec(kind=kind, value_head=True, frozen_patterns=[ALL_ATTENTION]))
    before = {name: parameter.detach().clone() for name, parameter in session.named_parameters()}
    for _ in range(2):
        session.forward_backward(make_batch(), Value(), 1000)
        session.optim_step(0.1)
    for name, parameter in session.named_parameters():
        mixes = ".linear_attn." in name or ".self_attn." in name
        if mixes or name.startswith("lm_head"):
            assert torch.equal(parameter, before[name]), name
        elif ".experts." not in name and ".gate." not in name:  # an expert that no token chose has no gradient
            assert not torch.equal(parameter, before[name]), name
    assert {".linear_attn." in name for name in before} == {".self_attn." in name for name in before} == {True, False}


def test_an_adapter_without_attention_may_freeze_it_all_the_same(tmp_path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    lora = {"targets": ["down_proj"]}
    session = load(str(tmp_path), None).create_session("a", spec(lora=lora, frozen_patterns=[ALL_ATTENTION]))
    assert {name for name, _ in session.named_parameters()} == {t.name for t in session.trainables}
    with pytest.raises(ConfigError, match="freezes every parameter"):
        load(str(tmp_path), None).create_session("b", spec(lora={"targets": ["q_proj"]}, frozen_patterns=[ALL_ATTENTION]))
