"""Which contexts a model takes, and from which its numbers change."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
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

from rlframe.config import ConfigError
from rlframe.context_length import check_context, longest_context


def one_sentence(caught, *parts: str) -> None:
    message = str(caught.value)
    assert "\n" not in message and message.endswith((".", "?")), message
    for part in parts:
        assert part in message, message


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
