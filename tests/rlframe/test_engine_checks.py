"""What an engine cannot do is refused in one sentence, before anything starts."""

import pytest

from rlframe.config import Config, ConfigError
from rlframe.config.checks import check, unused
from rlframe.config.engine_checks import check_installed

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
