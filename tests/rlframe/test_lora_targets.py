"""What adapters go on: layers that are linear, on how much of the model, and whether that is said."""

import json
import re

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, Llama4TextConfig, Qwen3MoeConfig

from rlframe.backbone import Backbone
from rlframe.config import ConfigError, LoraConfig
from tests.support.session_cases import EXPERTS, MOE, SHAPE, Policy, load, make_batch, spec
from trainer.settings.config import Config
from workers.learner.sessions import check_sessions

LLAMA4 = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 24, "attention_chunk_size": 64}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    configs = {
        "llama4": Llama4TextConfig(**SHAPE, **LLAMA4, pad_token_id=0),
        "moe": Qwen3MoeConfig(**SHAPE | {"vocab_size": 61}, **MOE | {"moe_intermediate_size": 96}),
        "phimoe": AutoConfig.for_model("phimoe", **SHAPE, num_local_experts=4),
        "falcon_mamba": AutoConfig.for_model("falcon_mamba", vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=8),
        "falcon": AutoConfig.for_model("falcon", vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    }
    made = {}
    for name, config in configs.items():
        torch.manual_seed(0)
        made[name] = str(tmp_path_factory.mktemp(name))
        AutoModelForCausalLM.from_config(config).save_pretrained(made[name])
    return made


@pytest.mark.parametrize("name", ["llama4", "phimoe", "falcon", "falcon_mamba"])
def test_all_linear_is_what_is_linear_and_trains(name, folders):
    backbone = load(folders[name], None, attn_implementation="eager")
    session = backbone.create_session("actor", spec(lora={"targets": "all-linear"}))
    named = {path.rpartition(".")[2] for path in session.adapter.layers}
    assert not named & {"router", "out_proj"}  # fused state-space kernels go around the output projection
    assert name != "falcon_mamba" or "dt_proj" not in named  # it is never called, its weight is read
    expected = {"falcon": {"query_key_value", "dense_h_to_4h"}, "falcon_mamba": {"in_proj", "x_proj"}}
    assert named >= expected.get(name, {"q_proj", "o_proj"})
    session.forward_backward(make_batch(), Policy(), 1000)
    assert session.optim_step(0.1)["grad_norm"] > 0


@pytest.mark.parametrize(
    ("name", "targets", "reason"),
    [
        ("llama4", ["q_proj", "router"], "Llama4Router"),
        ("llama4", r".*\.router", "Llama4Router"),
        ("phimoe", ["router"], "PhimoeTopKRouter"),
        ("falcon_mamba", ["dt_proj"], "it reads its weight"),
        ("falcon_mamba", ["out_proj"], "fused kernels"),
    ],
)
def test_what_no_adapter_can_be_added_to_is_refused_on_the_outline(name, targets, reason, folders):
    outline = Backbone.outline(folders[name], trainable=False)
    with pytest.raises(ConfigError, match=reason):
        outline.create_session("actor", spec(lora={"targets": targets}))


def counted(folder, adapted):
    """Numbers in the folder's tensors, and in those whose names match."""
    with safe_open(f"{folder}/model.safetensors", "pt") as opened:
        sizes = {key: torch.Size(opened.get_slice(key).get_shape()).numel() for key in opened.keys()}  # noqa: SIM118
    return sum(size for key, size in sizes.items() if re.search(adapted, key)) / sum(sizes.values())


def test_stacked_experts_without_adapters_are_announced_with_their_share(folders):
    config = Config()
    config.actor.lora, config.algorithm.advantage = LoraConfig(rank=2), "none"
    (sentence,) = check_sessions(config, folders["moe"])
    layers, experts = (counted(folders["moe"], part) for part in (r"self_attn\.[qkvo]_proj|mlp\.gate\.", r"mlp\.experts\."))
    assert f"actor: adapters on {counted(folders['moe'], r'[qkvo]_proj'):.1%} of the model's weights" in sentence
    assert experts > 0.6 > layers and f"{experts:.1%} are experts stacked in one parameter and have none" in sentence
    config.actor.lora.target_parameters = json.loads(
        re.sub(r"([\w.]+)", r'"\1"', re.search(r"target_parameters=(\[.*?\])", sentence)[1])
    )
    assert config.actor.lora.target_parameters == sorted(EXPERTS)
    (sentence,) = check_sessions(config, folders["moe"])
    adapted = counted(folders["moe"], r"[qkvo]_proj|mlp\.experts\.")
    assert sentence == f"actor: adapters on {adapted:.1%} of the model's weights."
