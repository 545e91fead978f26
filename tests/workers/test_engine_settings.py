"""Whatever an engine gets from settings, `rollout.engine_args` may not give again: the user's would silently win."""

from transformers import Qwen3Config

from workers.engines.registry import engine_spec
from workers.engines.sglang.engine import SGLangEngine
from workers.engines.vllm.engine import VLLMEngine

TUNABLE = {"disable_log_stats", "log_level", "skip_server_warmup"}
"""Ours, and of no influence on what is sampled or trained."""


def test_what_vllm_gets_from_settings_is_ours():
    owned = engine_spec("vllm").owned
    engine = VLLMEngine("model", max_lora_rank=8, streams=True, tensor_parallel_size=2)
    assert set(engine._args) - set(owned) <= TUNABLE


def test_what_sglang_gets_from_settings_is_ours(tmp_path):
    Qwen3Config().save_pretrained(tmp_path)
    owned = engine_spec("sglang").owned
    engine = SGLangEngine(str(tmp_path), max_lora_rank=8)
    assert set(engine._args) - set(owned) <= TUNABLE
