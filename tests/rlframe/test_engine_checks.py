"""What an engine cannot do is refused in one sentence, before anything starts."""

import random
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    CohereConfig,
    Gemma3Config,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    MptConfig,
    Phi3Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rlframe.config import SEEDS, ConfigError, ModelConfig, engine_checks
from rlframe.config.engine_checks import ENGINE_OWNED, check_arguments, check_context, check_installed, longest_context
from rlframe.models import resolve_model
from trainer.settings.checks import check
from trainer.settings.config import Config
from trainer.settings.unused import unused

ADDRESSES = ["http://a:30000", "http://b:30000"]


def sglang_with(**settings) -> Config:
    config = Config()
    config.model.builder, config.rollout.engine = "tiny", "sglang"
    for name, value in settings.items():
        setattr(config.rollout, name, value)
    return config


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"top_p": 0.9}, ["rollout.top_p=0.9", "rollout.top_p=1"]),
        ({"top_k": 20}, ["rollout.top_k=20", "rollout.top_k=0"]),
        ({"engine_args": {"preferred_sampling_params": {"min_p": 0.1}}}, ["rollout.engine_args.preferred_sampling_params"]),
        ({"weight_sync": "adapter"}, ["rollout.on_update=keep", "rollout.on_update=abort", "rollout.weight_sync=merged"]),
        ({"server_urls": ADDRESSES}, ["rollout.server_urls has 2", "rollout.workers=1"]),
        ({"server_urls": ADDRESSES[:1] * 2, "workers": 2}, ["rollout.server_urls", "different"]),
        ({"server_urls": ["a:30000"]}, ["rollout.server_urls", "http://host:30000"]),
        ({"server_urls": ADDRESSES[:1], "engine_args": {"a": 1}}, ["rollout.engine_args", "rollout.server_urls"]),
        ({"engine_args": {"context_length": 9}}, ["rollout.engine_args.context_length", "rollout.max_model_len"]),
    ],
)
def test_what_sglang_cannot_do_is_refused(settings, named):
    with pytest.raises(ConfigError) as caught:
        check(sglang_with(**settings))
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    for part in named:
        assert part in message, message


def test_what_sglang_can_do_passes():
    check(sglang_with())
    check(sglang_with(weight_sync="adapter", on_update="abort"))
    check(sglang_with(server_urls=ADDRESSES, workers=2, weights_dir="/shared"))


def test_addresses_are_of_no_use_to_other_engines():
    assert "rollout.server_urls" in unused(Config()) and "rollout.server_urls" not in unused(sglang_with())


def test_a_missing_engine_says_what_to_install(monkeypatch):
    monkeypatch.setattr("rlframe.config.engine_checks.find_spec", lambda name: None)
    check_installed("torch")
    for engine in ("vllm", "sglang"):
        with pytest.raises(ConfigError, match=rf"rollout\.engine={engine} .* not installed .*rlframe\[{engine}\]"):
            check_installed(engine)


def one_sentence(caught, *parts: str) -> None:
    message = str(caught.value)
    assert "\n" not in message and message.endswith((".", "?")), message
    for part in parts:
        assert part in message, message


def with_arguments(engine: str, **arguments) -> Config:
    config = Config()
    config.model.builder, config.rollout.engine, config.rollout.engine_args = "tiny", engine, arguments
    return config


@pytest.mark.parametrize("name", sorted(ENGINE_OWNED))
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_argument_that_would_overrule_a_setting_is_refused_and_names_it(engine, name):
    with pytest.raises(ConfigError) as caught:
        check(with_arguments(engine, **{name: None}))
    one_sentence(caught, f"rollout.engine_args.{name} ", "leave it out")


DECLARED = {
    "enforce_eager": "bool",
    "block_size": "int | None",
    "gpu_memory_utilization": "float",
    "quantization": "QuantizationMethods | str | None",
    "compilation_config": "CompilationConfig",
}


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("enforce_eagre", True, ["did you mean enforce_eager?"]),
        ("block-size", 16, ["did you mean block_size?"]),
        ("gpu_memory_utilisation", 0.5, ["did you mean gpu_memory_utilization?"]),
        ("enforce_eager", "yes", ["enforce_eager=yes", "bool"]),
        ("enforce_eager", 1, ["enforce_eager=1", "bool"]),
        ("enforce_eager", None, ["enforce_eager=None", "bool"]),
        ("block_size", 16.5, ["block_size=16.5", "int | None"]),
        ("block_size", True, ["block_size=True", "int | None"]),
        ("gpu_memory_utilization", "0.5", ["gpu_memory_utilization=0.5", "float"]),
        ("gpu_memory_utilization", [0.5], ["gpu_memory_utilization=[0.5]", "float"]),
    ],
)
def test_an_argument_that_the_engine_does_not_take_is_refused(name, value, parts, monkeypatch):
    monkeypatch.setattr(engine_checks, "declared", lambda engine: DECLARED)
    with pytest.raises(ConfigError) as caught:
        check_arguments(with_arguments("vllm", **{name: value}).rollout)
    one_sentence(caught, f"rollout.engine_args.{name}", "rollout.engine=vllm", *parts)


def test_arguments_of_the_right_type_pass_and_those_of_an_engine_that_is_not_here_are_left_to_it(monkeypatch):
    right = {"enforce_eager": False, "block_size": None, "gpu_memory_utilization": 1, "quantization": "fp8"}
    monkeypatch.setattr(engine_checks, "declared", lambda engine: DECLARED)
    check_arguments(with_arguments("vllm", **right, compilation_config={"level": 3}).rollout)
    monkeypatch.setattr(engine_checks, "declared", lambda engine: None)
    check_arguments(with_arguments("vllm", anything=1).rollout)


def test_the_largest_seed_is_the_largest_that_everything_takes():
    for take in (np.random.RandomState, random.seed, torch.Generator().manual_seed):
        take(SEEDS - 1)
    with pytest.raises(ValueError, match="between 0 and 2"):
        np.random.RandomState(SEEDS)


@pytest.mark.parametrize("seed", [-1, SEEDS, 2**63, 2**64])
def test_a_seed_out_of_range_names_its_setting(seed, tmp_path):
    config = Config(seed=seed)
    config.model.builder = "tiny"
    with pytest.raises(ConfigError) as caught:
        check(config)
    one_sentence(caught, f"seed={seed} ")
    with pytest.raises(ConfigError) as caught:
        resolve_model(ModelConfig(name="tiny", builder="tiny", build={"seed": seed}), tmp_path)
    one_sentence(caught, f"model.build.seed={seed} ")


def test_the_largest_seed_works(tmp_path):
    config = Config(seed=SEEDS - 1)
    config.model.builder = "tiny"
    check(config)
    resolve_model(ModelConfig(name="tiny", builder="tiny", build={"seed": SEEDS - 1, "warmup_steps": 0}), tmp_path)


def rope(**parameters) -> dict:
    return {"rope_theta": 10000.0, **parameters}


CONFIGS = {
    "plain": (Qwen3Config(max_position_embeddings=4096), 4096),
    "experts": (Qwen3MoeConfig(max_position_embeddings=4096), 4096),
    "learned positions": (GPT2Config(n_positions=1024), 1024),
    "alibi": (MptConfig(max_seq_len=2048), 2048),
    "linear": (LlamaConfig(max_position_embeddings=2048, rope_parameters=rope(rope_type="linear", factor=4.0)), 8192),
    "dynamic": (LlamaConfig(max_position_embeddings=2048, rope_parameters=rope(rope_type="dynamic", factor=2.0)), 4096),
    "llama 3": (
        LlamaConfig(
            max_position_embeddings=131072,
            rope_parameters=rope(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
        ),
        131072,
    ),
    "yarn": (
        Qwen3Config(
            max_position_embeddings=131072,
            rope_parameters=rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768),
        ),
        131072,
    ),
    "long": (
        Phi3Config(
            max_position_embeddings=131072,
            original_max_position_embeddings=4096,
            rope_parameters=rope(
                rope_type="longrope",
                factor=32.0,
                short_factor=[1.0] * 48,
                long_factor=[2.0] * 48,
                original_max_position_embeddings=4096,
            ),
        ),
        131072,
    ),
    "a kind of RoPE for each kind of layer": (Gemma3Config().get_text_config(), 131072),
    "a longer context of its own": (CohereConfig(max_position_embeddings=8192, model_max_length=131072), 131072),
    "images": (LlavaConfig(text_config=LlamaConfig(max_position_embeddings=4096)).get_text_config(), 4096),
}
"""Configurations, and the longest context by the model cards' reading of such fields."""


SWITCHING = {"dynamic": 2048, "long": 4096}
"""Configurations whose rotary positions change for all tokens beyond a length, and that length."""


@pytest.mark.parametrize(("name", "length"), SWITCHING.items())
def test_a_context_beyond_which_all_positions_change_is_refused(name, length):
    config, longest = CONFIGS[name]
    assert longest_context(config) == longest
    check_context(length, config)
    with pytest.raises(ConfigError) as caught:
        check_context(length + 1, config)
    one_sentence(caught, f"rollout.max_model_len={length + 1}", "change for all tokens", f"at most {length}")


FIXED = {name: case for name, case in CONFIGS.items() if name not in SWITCHING}


@pytest.mark.parametrize(("config", "longest"), FIXED.values(), ids=FIXED)
def test_a_context_is_at_most_what_the_model_was_made_for(config, longest):
    assert longest_context(config) == longest
    check_context(longest, config)
    with pytest.raises(ConfigError) as caught:
        check_context(longest + 1, config)
    one_sentence(caught, f"rollout.max_model_len={longest + 1}", f"the {longest} tokens", "lower it")


def test_a_model_that_gives_no_context_takes_any():
    config = AutoConfig.for_model("mamba")
    assert longest_context(config) is None
    check_context(10**9, config)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_accepts_and_refuses_the_same_contexts():
    from vllm.config.model import _get_and_verify_max_len
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    def vllm_takes(length: int, config) -> bool:
        derived = ModelArchConfigConvertorBase(config, config).derive_max_model_len_and_key()
        architecture = SimpleNamespace(derived_max_model_len_and_key=derived)
        try:
            return _get_and_verify_max_len(config, architecture, None, length, False, None) == length
        except ValueError as error:
            assert "is greater than the derived max_model_len" in str(error)
            return False

    for name, (config, _) in CONFIGS.items():
        longest = longest_context(config)
        assert vllm_takes(longest, config) and not vllm_takes(longest + 1, config), name
    assert vllm_takes(10**9, AutoConfig.for_model("mamba"))
