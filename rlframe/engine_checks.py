"""What a rollout engine asks of the configuration, and of the machine; one sentence for each refusal."""

from __future__ import annotations

from importlib.util import find_spec

from rlframe.config import Config, ConfigError, RolloutConfig

ENGINE_OWNED = {
    "model": "model.path decides",
    "dtype": "rollout.dtype decides",
    "seed": "seed decides",
    "max_model_len": "rollout.max_model_len decides",
    "max_num_seqs": "rollout.max_concurrency decides",
    "tensor_parallel_size": "rollout.tensor_parallel_size decides",
    "trust_remote_code": "model.trust_remote_code decides",
    "logprobs_mode": "the losses need (log-probabilities after temperature)",
    "max_logprobs": "rollout.head_size needs",
    "generation_config": "the losses need (no sampling defaults of the model's own)",
    "override_generation_config": "the losses need (no sampling defaults of the model's own)",
    "preferred_sampling_params": "the losses need (no sampling defaults of the model's own)",
    "logits_processors": "the losses need (the model's own distribution over the whole vocabulary)",
    "worker_extension_cls": "weight sync needs",
    "model_path": "model.path decides",
    "random_seed": "seed decides",
    "context_length": "rollout.max_model_len decides",
    "max_running_requests": "rollout.max_concurrency decides",
    "tp_size": "rollout.tensor_parallel_size decides",
    "host": "the worker decides",
    "port": "the worker decides",
    "skip_tokenizer_init": "the worker decides (token ids in and out)",
}
"""Engine arguments that are not the user's: name -> the end of "would overrule what ..."."""
INSTALL = {
    "vllm": "on GPUs `pip install 'rlframe[vllm]'`, for a CPU `make install`",
    "sglang": "on GPUs `pip install 'rlframe[sglang]'`, for a CPU `make install-sglang`, an environment of its own",
}
"""Engines that are packages of their own: how to get them."""


def check_engine(config: Config) -> None:
    """Refuse what the chosen engine cannot do; a part of `rlframe.checks.check`.

    Raises:
        ConfigError: one sentence that names the settings and says what to change.
    """
    for name in config.rollout.engine_args:
        _refuse(
            name in ENGINE_OWNED,
            f"rollout.engine_args.{name} would overrule what {ENGINE_OWNED.get(name)}; leave it out.",
        )
    if config.rollout.engine == "sglang":
        _sglang(config.rollout)


def _sglang(rollout: RolloutConfig) -> None:
    urls = rollout.server_urls
    _refuse(
        rollout.weight_sync == "adapter" and rollout.on_update == "keep",
        "rollout.on_update=keep would let requests go on under the adapter that they started with, since rollout.engine=sglang "
        "binds each request to one; set rollout.on_update=abort or rollout.weight_sync=merged.",
    )
    _refuse(
        bool(urls) and len(urls) != rollout.workers,
        f"rollout.server_urls has {len(urls)} addresses and rollout.workers={rollout.workers}; each worker needs its own.",
    )
    _refuse(
        len(set(urls)) < len(urls) or any(not url.startswith(("http://", "https://")) for url in urls),
        f"rollout.server_urls={urls} must be different addresses such as http://host:30000.",
    )
    _refuse(
        bool(urls) and bool(rollout.engine_args),
        "rollout.engine_args cannot change servers that run already (rollout.server_urls); give them to the servers instead.",
    )


def check_installed(engine: str) -> None:
    """Refuse an engine whose package is not installed here; for the machine that the engine will run on.

    Raises:
        ConfigError: one sentence that says what to install.
    """
    _refuse(
        engine in INSTALL and find_spec(engine) is None,
        f"rollout.engine={engine} needs the package {engine}, which is not installed here; {INSTALL.get(engine)}.",
    )


def _refuse(condition: bool, sentence: str) -> None:
    if condition:
        raise ConfigError(sentence)
