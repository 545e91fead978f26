"""What an engine cannot do is refused in one sentence, before anything starts."""

from dataclasses import replace

import pytest

from rlframe.config import ConfigError
from trainer.settings.checks import check
from trainer.settings.config import Config
from trainer.settings.unused import unused
from workers.engines import checks
from workers.engines.checks import check_arguments, check_installed
from workers.engines.registry import ENGINES, engine_spec
from workers.engines.vllm.spec import VLLMSpec

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
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    for engine in ("vllm", "sglang"):
        with pytest.raises(ConfigError, match=rf"rollout\.engine={engine} .* not installed .*rlframe\[train,{engine}\]"):
            check_installed(with_arguments(engine).rollout)
    check_installed(replace(with_arguments("sglang").rollout, server_urls=ADDRESSES))  # those run elsewhere


def one_sentence(caught, *parts: str) -> None:
    message = str(caught.value)
    assert "\n" not in message and message.endswith((".", "?")), message
    for part in parts:
        assert part in message, message


def with_arguments(engine: str, **arguments) -> Config:
    config = Config()
    config.model.builder, config.rollout.engine, config.rollout.engine_args = "tiny", engine, arguments
    return config


@pytest.mark.parametrize(("engine", "name"), [(e, name) for e in ENGINES for name in sorted(engine_spec(e).owned)])
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
    monkeypatch.setattr(VLLMSpec, "arguments", lambda self: DECLARED)
    with pytest.raises(ConfigError) as caught:
        check_arguments(with_arguments("vllm", **{name: value}).rollout)
    one_sentence(caught, f"rollout.engine_args.{name}", "rollout.engine=vllm", *parts)


def test_arguments_of_the_right_type_pass_and_those_of_an_engine_that_is_not_here_are_left_to_it(monkeypatch):
    right = {"enforce_eager": False, "block_size": None, "gpu_memory_utilization": 1, "quantization": "fp8"}
    monkeypatch.setattr(VLLMSpec, "arguments", lambda self: DECLARED)
    check_arguments(with_arguments("vllm", **right, compilation_config={"level": 3}).rollout)
    monkeypatch.setattr(VLLMSpec, "arguments", lambda self: None)
    check_arguments(with_arguments("vllm", anything=1).rollout)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_any_way_of_reading_the_model_s_weights_is_the_user_s_choice_but_random_ones_are_refused(engine):
    for name in ("auto", "safetensors", "fastsafetensors", "runai_streamer"):
        check(with_arguments(engine, load_format=name))
    with pytest.raises(ConfigError) as caught:
        check(with_arguments(engine, load_format="dummy"))
    one_sentence(caught, "rollout.engine_args.load_format=dummy", "random weights")


def test_arguments_that_an_engine_does_not_read_are_refused():
    assert "rollout.engine_args" in unused(with_arguments("torch")) and "rollout.engine_args" not in unused(Config())
