"""What a rollout engine asks of the configuration, and of the machine; one sentence for each refusal."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rlframe.config import ConfigError
from rlframe.config.engine_arguments import declared, fits
from rlframe.config.validate import nearest

if TYPE_CHECKING:
    from workers.rollout.settings import RolloutConfig
    from workers.settings import Config

ENGINE_OWNED = {
    "model": "model.path decides",
    "dtype": "rollout.dtype decides",
    "seed": "seed decides",
    "max_model_len": "rollout.max_model_len decides",
    "max_num_seqs": "rollout.max_concurrency decides",
    "tensor_parallel_size": "rollout.tensor_parallel_size decides",
    "trust_remote_code": "model.trust_remote_code decides",
    **dict.fromkeys(
        ("model_weights", "tokenizer", "tokenizer_path", "load_format"),
        "model.path decides (weights and tokenizer of one folder)",
    ),
    **dict.fromkeys(
        ("hf_overrides", "hf_config_path", "model_class_overrides", "json_model_override_args", "runner", "convert"),
        "model.path decides (the trainer computes with the model as its folder describes it)",
    ),
    **dict.fromkeys(
        ("enable_lora", "max_loras", "max_lora_rank", "max_loras_per_batch", "max_loaded_loras", "lora_paths"),
        "rollout.weight_sync and actor.lora.rank decide",
    ),
    "lora_target_modules": "actor.lora.targets decides",
    "weight_transfer_config": "rollout.weight_channel decides",
    **dict.fromkeys(
        ("pipeline_parallel_size", "data_parallel_size", "distributed_executor_backend", "pp_size", "dp_size", "nnodes"),
        "rollout.workers and rollout.tensor_parallel_size decide",
    ),
    **dict.fromkeys(("logits_processors", "watermark_config"), "the losses need (the sampled distribution is the model's own)"),
    "logprobs_mode": "the losses need (log-probabilities after temperature)",
    "max_logprobs": "rollout.head_size needs",
    **dict.fromkeys(
        ("generation_config", "override_generation_config", "sampling_defaults", "preferred_sampling_params"),
        "the losses need (no sampling defaults of the model's own)",
    ),
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
    """Refuse what the chosen engine cannot do; a part of `trainer.settings.checks.check`.

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


def check_arguments(rollout: RolloutConfig) -> None:
    """Compare ``rollout.engine_args`` with the arguments that the engine installed here declares; nothing where it is not here.

    Raises:
        ConfigError: an argument that there is not, or a value of another type.
    """
    arguments = declared(rollout.engine) if rollout.engine_args else None
    if arguments is None:
        return
    for name, value in rollout.engine_args.items():
        key = f"rollout.engine_args.{name}"
        if name not in arguments:
            near = nearest(name, arguments)
            raise ConfigError(f"{key} is not an argument of rollout.engine={rollout.engine}; did you mean {near}?")
        _refuse(
            not fits(value, arguments[name]),
            f"{key}={value} is of another type than rollout.engine={rollout.engine} takes there: {arguments[name]}.",
        )


LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""Names that architectures give to their longest context."""
SCALED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of RoPE whose longest context counts the scaling."""


def check_context(max_model_len: int, text_config: Any) -> None:
    """Refuse a context that the model was not made for; by the rule of vLLM, for every engine, since the trainer has no other.

    Args:
        max_model_len: ``rollout.max_model_len``.
        text_config: transformers' configuration of the language model.

    Raises:
        ConfigError: it is longer than `longest_context`, or than the rotary positions stay the same.
    """
    check_rotary_length(max_model_len, text_config)
    longest = longest_context(text_config)
    _refuse(
        longest is not None and max_model_len > longest,
        f"rollout.max_model_len={max_model_len} is more than the {longest} tokens that the model takes by its config.json "
        "(positions, with the scaling of RoPE); lower it.",
    )


def check_rotary_length(max_model_len: int, text_config: Any) -> None:
    """Refuse lengths at which a token's numbers would depend on how many tokens came after it; arguments as in `check_context`.

    Raises:
        ConfigError: it is above the length up to which the frequencies of a dynamic or longrope model stay as they are.
    """
    rope = getattr(text_config, "rope_parameters", None) or {}
    for part in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        name = str(part.get("rope_type"))
        original = part.get("original_max_position_embeddings") or getattr(text_config, "max_position_embeddings", None)
        _refuse(
            ("dynamic" in name or name == "longrope") and original is not None and max_model_len > original,
            f"rollout.max_model_len={max_model_len}, but this model's rotary positions (rope_type={name}) change for all "
            f"tokens once a sequence is longer than {original}, so that what was sampled is not what is trained on; set "
            f"rollout.max_model_len to at most {original}.",
        )


def longest_context(text_config: Any) -> int | None:
    """Most tokens that a model takes by its configuration, the scaling of RoPE included; None: it does not say."""
    lengths = [length for name in LENGTHS if (length := getattr(text_config, name, None)) is not None]
    own = getattr(text_config, "model_max_length", None)
    if not lengths and not own:
        return None
    rope = getattr(text_config, "rope_parameters", None) or {}
    layers = [rope] if "rope_type" in rope else [part for part in rope.values() if isinstance(part, dict)]
    factor = 1.0
    for part in layers:
        if part.get("rope_type") not in SCALED_ALREADY and "gemma3" not in text_config.model_type:
            factor = part.get("factor") or factor
    return max(int((own or min(lengths)) * factor), own or 0)


def _refuse(condition: bool, sentence: str) -> None:
    if condition:
        raise ConfigError(sentence)
