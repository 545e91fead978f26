"""Which configurations make sense; one sentence for each that does not. Composition lives in `trainer.settings.compose`.

Checks look at the resolved `Config` only, so they hold for the command line, for a saved ``config.yaml`` and for a
`Config` built in Python alike. They need neither Ray nor an engine, and know nothing of the machine (see
`trainer.cluster.placement`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from rlframe.config import (
    ENGINE_DTYPES,
    MODEL_DTYPES,
    PROMPT_FILES,
    AlgorithmConfig,
    Config,
    ConfigError,
    OptimConfig,
    serves_other_weights,
)
from rlframe.config.engine_checks import SEEDS, check_engine
from rlframe.config.task_checks import GENERATED_TASKS, check_task

ROLLOUT_IS = ("token", "sequence")
ADVANTAGES = ("gae", "running_mean", "group", "none")
ENGINES = ("vllm", "sglang", "torch")
QUANTIZED = ("int8", "int4", "int3", "fp8")
"""Formats of ``rollout.quantize``."""
HEAD_MODULES = ("lm_head", "embed_out", "output_layer")
"""Names that architectures give to the output projection."""


def check(config: Config) -> None:
    """Refuse what is out of range or not defined.

    Raises:
        ConfigError: one sentence that names the setting, or the two settings that do not go together, and what to change.
    """
    for part in (
        _names,
        _ranges,
        _sources,
        check_task,
        _sampling,
        _algorithm,
        _score_centering,
        _advantage,
        _sessions,
        _optimisers,
        _devices,
        _weight_channel,
        check_engine,
    ):
        part(config)


def parse_threshold(value: Any, key: str) -> tuple[float | None, float]:
    """``c`` -> (None, c), ``"lo_hi"`` -> (lo, hi).

    Raises:
        ConfigError: neither a positive number nor two of them, lower first.
    """
    try:
        bounds = [float(part) for part in str(value).split("_")]
    except ValueError:
        bounds = []
    good = len(bounds) in (1, 2) and all(0 <= bound < float("inf") for bound in bounds) and bounds[-1] > 0
    if not good or (len(bounds) == 2 and bounds[0] >= bounds[1]):
        raise ConfigError(f'{key}={value} is not a threshold; write a positive number (2.0) or a band "lo_hi" ("0.5_5.0").')
    return (bounds[0] if len(bounds) == 2 else None), bounds[-1]


def _refuse(condition: bool, sentence: str) -> None:
    if condition:
        raise ConfigError(sentence)


def _one_of(key: str, value: Any, allowed: Collection[str], optional: bool = False) -> None:
    listed = ", ".join([*allowed, *(["null"] if optional else [])])
    _refuse(value not in allowed and not (optional and value is None), f"{key}={value} is not known; choose one of {listed}.")


def _names(config: Config) -> None:
    a = config.algorithm
    _one_of("algorithm.advantage", a.advantage, ADVANTAGES)
    _one_of("rollout.engine", config.rollout.engine, ENGINES)
    _one_of("rollout.weight_sync", config.rollout.weight_sync, ("auto", "merged", "adapter", "full"))
    _one_of("rollout.quantize", config.rollout.quantize, QUANTIZED, optional=True)
    _one_of("actor.mode", config.actor.mode, ("lora", "full"))
    _one_of("critic.mode", config.critic.mode, ("lora", "full"))
    _one_of("cluster.device", config.cluster.device, ("auto", "cpu", "cuda"))
    _one_of("task.on_reward_failure", config.task.on_reward_failure, ("raise", "drop", "zero"))
    _one_of("log.wandb", config.log.wandb, ("auto", "online", "offline", "disabled"))
    _one_of("model.dtype", config.model.dtype, MODEL_DTYPES)
    _one_of("rollout.dtype", config.rollout.dtype, ENGINE_DTYPES)
    for key in ("name", "run_dir"):
        _refuse(not getattr(config, key).strip(), f"{key} is empty; give it a value.")


def _at_least(config: Config, low: float, keys: str) -> None:
    for key in keys.split():
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        _refuse(not value >= low, f"{key}={value} is out of range; it must be at least {low:g}.")


def _ranges(config: Config) -> None:
    _at_least(
        config,
        1,
        "steps batch_size algorithm.rollouts_per_prompt rollout.workers rollout.max_new_tokens rollout.max_model_len "
        "rollout.max_concurrency rollout.tensor_parallel_size actor.ranks actor.lora.rank actor.micro_batch_tokens "
        "actor.threads critic.lora.rank critic.updates_per_step critic.ensemble checkpoint.keep_last "
        "task.reward_workers log.rollouts_tokens server.max_rank server.max_models server.max_loras server.max_request_mb",
    )
    _at_least(
        config,
        0,
        "seed max_staleness reorder_window algorithm.clip_low algorithm.clip_high rollout.top_k rollout.head_size "
        "rollout.max_restarts rollout.probe_every rollout.probe_tolerance rollout.cpus rollout.gpus actor.cpus actor.gpus "
        "critic.warmup_steps critic.vf_coef eval.every eval.temperature checkpoint.every checkpoint.keep_every "
        "checkpoint.keep_best checkpoint.max_failures log.rollouts_every log.rollouts_count log.rollouts_mb "
        "rollout.weight_noise server.port",
    )
    _refuse(config.seed >= SEEDS, f"seed={config.seed} is out of range; it must be below 2**32.")
    memory = config.task.reward_memory_mb
    _refuse(
        memory is not None and memory < 32,
        f"task.reward_memory_mb={memory} is too little for a Python process; it must be at least 32, or null.",
    )
    for key, seconds in (
        ("task.reward_timeout_s", config.task.reward_timeout_s),
        ("task.reward_startup_timeout_s", config.task.reward_startup_timeout_s),
        ("rollout.timeout_s", config.rollout.timeout_s),
        ("cluster.startup_timeout_s", config.cluster.startup_timeout_s),
        ("server.idle_timeout_s", config.server.idle_timeout_s),
        ("server.result_ttl_s", config.server.result_ttl_s),
        ("cluster.watchdog_s", config.cluster.watchdog_s),
    ):
        _refuse(not seconds > 0, f"{key}={seconds} is out of range; it must be above 0.")
    share, limit, watchdog = config.eval.max_failed, config.rollout.timeout_s, config.cluster.watchdog_s
    _refuse(not 0 <= share <= 1, f"eval.max_failed={share} is out of range; it must be a share, from 0 to 1.")
    _refuse(
        limit >= watchdog,
        f"rollout.timeout_s={limit:g} lets one episode take as long as cluster.watchdog_s={watchdog:g} lets a run stand still; "
        "raise cluster.watchdog_s above it.",
    )
    every, keep_every = config.checkpoint.every, config.checkpoint.keep_every
    _refuse(
        keep_every > 0 and every > 0 and keep_every % every != 0,
        f"checkpoint.keep_every={keep_every} is not a multiple of checkpoint.every={every}, so the steps it names have no "
        "checkpoint; choose a multiple.",
    )
    warmup, steps = config.critic.warmup_steps, config.steps
    _refuse(
        config.algorithm.advantage == "gae" and warmup >= steps,
        f"critic.warmup_steps={warmup} leaves the actor no step with steps={steps}; lower critic.warmup_steps or raise steps.",
    )


def _sources(config: Config) -> None:
    model, task = config.model, config.task
    _refuse(
        model.path is not None and model.builder is not None,
        f"model.path and model.builder={model.builder} are both set; choose model=local for a folder of your own.",
    )
    _refuse(
        model.path is None and model.builder is None,
        "model.path is not set and model.builder is null; set model.path to a local Hugging Face folder or choose model=tiny.",
    )
    for key in ("train", "reward", "eval"):
        given = getattr(task, key)
        _refuse(
            task.name in PROMPT_FILES and given is None and key != "eval",
            f"task.{key} is not set and task.name={task.name} needs it; set task.{key}=...",
        )
        _refuse(
            task.name in GENERATED_TASKS and given is not None,
            f"task.{key}={given} is not used by task.name={task.name}; choose task=jsonl or parquet for a file of prompts.",
        )


def _sampling(config: Config) -> None:
    r = config.rollout
    _refuse(
        not r.temperature > 0,
        f"rollout.temperature={r.temperature} cannot be trained on, since the logits are divided by it; it must be above 0.",
    )
    _refuse(not 0 < r.top_p <= 1, f"rollout.top_p={r.top_p} is out of range; it must be above 0 and at most 1.")
    for key, value, neutral in (("top_p", r.top_p, 1), ("top_k", r.top_k, 0)):
        _refuse(
            value != neutral,
            f"rollout.{key}={value} makes the sampler renormalise over the tokens that it kept and the trainer knows only the "
            f"whole vocabulary, so every ratio of the two would be off by the mass that was kept; set rollout.{key}={neutral}.",
        )
    _refuse(
        r.max_new_tokens >= r.max_model_len,
        f"rollout.max_new_tokens={r.max_new_tokens} leaves no room for a prompt in rollout.max_model_len={r.max_model_len}; "
        "raise rollout.max_model_len.",
    )


def _algorithm(config: Config) -> None:
    check_algorithm(config.algorithm)


def check_algorithm(a: AlgorithmConfig) -> None:
    """Refuse a policy loss, correction or combination of them that is not defined; for those who use the losses alone.

    Raises:
        ConfigError: one sentence, as `check` would say it.
    """
    from rlframe.losses.rules import POLICY_LOSSES  # needs torch, and this function

    _one_of("algorithm.policy_loss", a.policy_loss, POLICY_LOSSES)
    _one_of("algorithm.rollout_is", a.rollout_is, ROLLOUT_IS, optional=True)
    _correction(a)
    if a.score_centering:
        on, off = "algorithm.score_centering=true", "set algorithm.score_centering=false"
        centred = [name for name, make in POLICY_LOSSES.items() if make(a).centering is not None]
        _refuse(
            a.policy_loss not in centred,
            f"{on} needs a weight that depends on a token's ratio alone and algorithm.policy_loss={a.policy_loss} has none; "
            f"choose algorithm.policy_loss={', '.join(centred)}, or {off}.",
        )
        _refuse(
            a.rollout_is == "sequence",
            f"{on} needs one weight per token and algorithm.rollout_is=sequence gives one per sequence; "
            f"set algorithm.rollout_is=token or null, or {off}.",
        )


def _correction(a: AlgorithmConfig) -> None:
    _refuse(
        a.rollout_is is not None and a.policy_loss != "reinforce",
        f"algorithm.rollout_is={a.rollout_is} would apply the ratio twice with algorithm.policy_loss={a.policy_loss}, "
        "whose loss already has it; set algorithm.rollout_is=null or algorithm.policy_loss=reinforce.",
    )
    _refuse(
        a.policy_loss == "dis" and a.clip_low >= 1,
        f"algorithm.clip_low={a.clip_low} makes the lower end of the ratio band 0 or less with algorithm.policy_loss=dis; "
        "it must be below 1.",
    )
    _refuse(
        a.policy_loss in ("ppo_clip", "cispo") and a.clip_low > 1,
        f"algorithm.clip_low={a.clip_low} makes the lower end of the ratio band negative with "
        f"algorithm.policy_loss={a.policy_loss}; it must be at most 1.",
    )
    _refuse(
        a.clip_dual is not None and not a.clip_dual > 1,
        f"algorithm.clip_dual={a.clip_dual} is out of range; it must be above 1, or null.",
    )
    _refuse(
        a.rollout_rs is None and a.rollout_rs_threshold is not None,
        f"algorithm.rollout_rs_threshold={a.rollout_rs_threshold} has no rule to bound with algorithm.rollout_rs=null; "
        "choose a rule or set algorithm.rollout_rs_threshold=null.",
    )
    parse_threshold(a.rollout_is_threshold, "algorithm.rollout_is_threshold")
    _refuse(
        a.rollout_rs is not None and a.rollout_rs_threshold is None,
        f"algorithm.rollout_rs={a.rollout_rs} needs a bound and algorithm.rollout_rs_threshold is null; "
        'set algorithm.rollout_rs_threshold, such as "0.999_1.001".',
    )
    from rlframe.losses.corrections import rejection  # needs torch, and this module's parse_threshold

    rejection(a.rollout_rs, a.rollout_rs_threshold)


def _score_centering(config: Config) -> None:
    _refuse(
        config.algorithm.score_centering and config.rollout.head_size < 1,
        "algorithm.score_centering=true needs the sampler's heads and rollout.head_size=0 asks for none; "
        "raise rollout.head_size, or set algorithm.score_centering=false.",
    )


def _advantage(config: Config) -> None:
    a, per = config.algorithm, config.algorithm.rollouts_per_prompt
    _refuse(
        a.advantage == "group" and per < 2,
        "algorithm.advantage=group compares rollouts of one prompt and algorithm.rollouts_per_prompt=1 gives nothing to "
        "compare with; raise algorithm.rollouts_per_prompt or choose algorithm.advantage=gae.",
    )
    _refuse(
        config.batch_size % per != 0,
        f"algorithm.rollouts_per_prompt={per} does not divide batch_size={config.batch_size}, so a group would be cut; "
        f"set batch_size to a multiple of {per}.",
    )
    room = config.max_staleness * config.batch_size // per
    _refuse(
        config.reorder_window > room,
        f"reorder_window={config.reorder_window} takes more than the {room} prompts that max_staleness={config.max_staleness} "
        "lets run ahead of the batch in training; lower reorder_window or raise max_staleness.",
    )
    _refuse(
        a.normalize_advantages and a.advantage != "group",
        f"algorithm.normalize_advantages=true divides by the deviation of a group and algorithm.advantage={a.advantage} has no "
        "groups; set algorithm.normalize_advantages=false or algorithm.advantage=group.",
    )
    for key, value in (
        ("gamma", a.gamma),
        ("lambda_critic", a.lambda_critic),
        *([] if a.lambda_policy == "adaptive" else [("lambda_policy", a.lambda_policy)]),
    ):
        number = isinstance(value, int | float) and 0 <= value <= 1
        _refuse(not number, f"algorithm.{key}={value} is out of range; it must be between 0 and 1{_adaptive(key)}.")
    _refuse(not a.lambda_alpha > 0, f"algorithm.lambda_alpha={a.lambda_alpha} is out of range; it must be above 0.")
    _refuse(
        not 0 <= a.running_mean_decay < 1,
        f"algorithm.running_mean_decay={a.running_mean_decay} is out of range; it must be at least 0 and below 1.",
    )


def _adaptive(key: str) -> str:
    return ", or adaptive" if key == "lambda_policy" else ""


def _sessions(config: Config) -> None:
    mode, sync = config.actor.mode, config.rollout.weight_sync
    _refuse(
        mode == "full" and sync in ("merged", "adapter"),
        f"rollout.weight_sync={sync} sends an adapter and actor.mode=full has none; set rollout.weight_sync=full or auto.",
    )
    _refuse(
        serves_other_weights(config.rollout) and sync in ("merged", "adapter"),
        f"rollout.weight_sync={sync} does not send the weights that rollout.quantize and rollout.weight_noise change; "
        "set rollout.weight_sync=auto.",
    )
    _refuse(
        mode == "lora" and sync == "full" and not serves_other_weights(config.rollout),
        "rollout.weight_sync=full sends weights that actor.mode=lora leaves frozen; set rollout.weight_sync=merged or auto.",
    )
    critic = config.critic
    for key, many in (("ensemble", critic.ensemble > 1), ("per_env", critic.per_env)):
        value = str(getattr(critic, key)).lower()
        _refuse(
            many and critic.mode == "full",
            f"critic.{key}={value} needs one adapter per critic and critic.mode=full has none; set critic.mode=lora.",
        )
    _refuse(
        critic.ensemble > 1 and critic.per_env,
        f"critic.ensemble={critic.ensemble} and critic.per_env=true are not defined together; set one of them to its default.",
    )
    for role, section in (("actor", config.actor), ("critic", config.critic)):
        _refuse(
            any(not pattern for pattern in section.frozen_patterns),
            f"{role}.frozen_patterns has an empty pattern, which every parameter name contains; leave it out.",
        )
        if section.lora.targets or not section.lora.target_parameters:
            _targets(role, section.lora.targets)


def _targets(role: str, targets: Any) -> None:
    key = f"{role}.lora.targets"
    listed = isinstance(targets, list) and all(isinstance(name, str) and name for name in targets)
    _refuse(
        not (listed or isinstance(targets, str)) or not targets,
        f"{key}={targets} names no module; write all-linear, a regular expression or a list such as [q_proj,v_proj].",
    )
    heads = [name for name in HEAD_MODULES if name in (targets if listed else [targets])]
    _refuse(
        role == "critic" and bool(heads),
        f"{key} names {''.join(heads)}, but the critic has a value head in its place; leave it out.",
    )


def _optimisers(config: Config) -> None:
    _optimiser("actor.optim", config.actor.optim)
    _optimiser("critic.optim", config.critic.optim)


def _optimiser(key: str, optim: OptimConfig) -> None:
    def within(name: str, good: Callable[[Any], bool], wanted: str) -> None:
        value = getattr(optim, name)
        _refuse(not good(value), f"{key}.{name}={value} is out of range; it must be {wanted}.")

    within("lr", lambda v: 0 <= v < float("inf"), "at least 0")
    within("betas", lambda v: len(v) == 2 and all(0 <= beta < 1 for beta in v), "two numbers at least 0 and below 1")
    within("eps", lambda v: v > 0, "above 0")
    within("weight_decay", lambda v: v >= 0, "at least 0")
    within("max_grad_norm", lambda v: v is None or v > 0, "above 0, or null")
    within("warmup_steps", lambda v: v >= 0, "at least 0")
    within("min_lr_ratio", lambda v: 0 <= v <= 1, "between 0 and 1")
    within("total_steps", lambda v: v is None or v > optim.warmup_steps, f"above {key}.warmup_steps={optim.warmup_steps}")
    _one_of(f"{key}.schedule", optim.schedule, ("constant", "linear", "cosine"))
    _refuse(
        optim.schedule != "constant" and optim.total_steps is None,
        f"{key}.schedule={optim.schedule} decays until {key}.total_steps, which is null; set {key}.total_steps, for example "
        "to '${steps}'.",
    )


def _weight_channel(config: Config) -> None:
    rollout, on, off = config.rollout, "rollout.weight_channel=nccl", "set rollout.weight_channel=ray"
    _one_of("rollout.weight_channel", rollout.weight_channel, ("ray", "nccl"))
    if rollout.weight_channel == "ray":
        return
    _refuse(rollout.engine != "vllm", f"{on} is vLLM's and rollout.engine={rollout.engine} does not have it; {off}.")
    _refuse(
        config.actor.mode != "full" and not serves_other_weights(rollout),
        f"{on} sends full weights, and actor.mode={config.actor.mode} changes only some; {off}.",
    )
    _refuse(
        not (rollout.gpus and config.actor.gpus),
        f"{on} goes from GPU to GPU, with actor.gpus={config.actor.gpus:g} and rollout.gpus={rollout.gpus:g}; {off}.",
    )


def _devices(config: Config) -> None:
    device, actor, rollout = config.cluster.device, config.actor, config.rollout
    _refuse(
        device == "cuda" and actor.gpus == 0,
        "cluster.device=cuda puts the learner on a GPU and actor.gpus=0 reserves none; set actor.gpus=1 or cluster.device=cpu.",
    )
    _refuse(
        "flash" in config.model.attn_implementation and (actor.gpus == 0 or config.model.dtype == "float32"),
        f"model.attn_implementation={config.model.attn_implementation} runs on GPUs in two-byte numbers, with "
        f"actor.gpus={actor.gpus:g} and model.dtype={config.model.dtype}; set actor.gpus=1 and model.dtype=bfloat16, or "
        "model.attn_implementation=sdpa.",
    )
    _refuse(
        device == "cpu" and actor.gpus > 0,
        f"cluster.device=cpu leaves actor.gpus={actor.gpus:g} unused; set actor.gpus=0 or cluster.device=cuda.",
    )
    _refuse(
        rollout.engine == "torch" and rollout.tensor_parallel_size > 1,
        f"rollout.tensor_parallel_size={rollout.tensor_parallel_size} is not defined for rollout.engine=torch; set it to 1.",
    )
    _refuse(
        0 < rollout.gpus < rollout.tensor_parallel_size,
        f"rollout.gpus={rollout.gpus:g} is fewer than rollout.tensor_parallel_size={rollout.tensor_parallel_size}; "
        "raise rollout.gpus.",
    )
