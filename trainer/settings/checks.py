"""Checks of whole configurations: every section by its own check, and pairs of settings across sections.

Checks look at the resolved `Config` only, so they hold for the command line, for a saved ``config.yaml`` and for a
`Config` built in Python alike. They need neither Ray nor an engine, and know nothing of the machine (see
`trainer.cluster.placement`).
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from rlframe.advantages import check_advantage, make_estimator
from rlframe.config.model import check_model
from rlframe.config.validate import check_fields, refuse
from trainer.settings.config import Config
from trainer.settings.sections import check_checkpoint
from workers.engines.checks import check_engine
from workers.environments.task_checks import check_task
from workers.learner.settings import check_actor, check_critic
from workers.rollout.settings import check_rollout, serves_other_weights


def check(config: Config) -> None:
    """Refuse what is out of range or not defined.

    Raises:
        ConfigError: one sentence that names the setting, or the two settings that do not go together, and what to change.
    """
    from rlframe.losses.checks import check_algorithm  # needs torch

    for key in ("name", "run_dir"):
        refuse(not getattr(config, key).strip(), f"{key} is empty; give it a value.")
    check_fields(config)
    check_model(config.model)
    check_task(config.task)
    check_algorithm(config.algorithm)
    check_advantage(config.algorithm)
    check_rollout(config.rollout)
    check_actor(config.actor)
    check_critic(config.critic)
    check_checkpoint(config.checkpoint)
    for key in ("cluster", "eval", "log", "server"):
        check_fields(getattr(config, key), key)
    for pair in (_steps, _groups, _segments, _time_limits, _score_centering, _weight_sync, _devices, check_engine):
        pair(config)


def check_ranges(config: Any, key: str = "") -> None:
    """Refuse a setting that is out of range: what can be said where modules of the user's own are not at hand.

    Raises:
        ConfigError: one sentence that names the setting and says what to change.
    """
    check_fields(config, key)
    for field in fields(config):
        if is_dataclass(section := getattr(config, field.name)):
            check_ranges(section, f"{key}.{field.name}".lstrip("."))


def _steps(config: Config) -> None:
    warmup, steps = config.critic.warmup_steps, config.steps
    refuse(
        make_estimator(config.algorithm).needs_critic and warmup >= steps,
        f"critic.warmup_steps={warmup} leaves the actor no step with steps={steps}; lower critic.warmup_steps or raise steps.",
    )


def _groups(config: Config) -> None:
    per = config.algorithm.rollouts_per_prompt
    refuse(
        config.batch_size % per != 0,
        f"algorithm.rollouts_per_prompt={per} does not divide batch_size={config.batch_size}, so a group would be cut; "
        f"set batch_size to a multiple of {per}.",
    )
    room = config.max_staleness * config.batch_size // per
    refuse(
        config.reorder_window > room,
        f"reorder_window={config.reorder_window} takes more than the {room} prompts that max_staleness={config.max_staleness} "
        "lets run ahead of the batch in training; lower reorder_window or raise max_staleness.",
    )


def _segments(config: Config) -> None:
    tokens, algorithm = config.rollout.segment_tokens, config.algorithm
    if tokens is None:
        return
    refuse(
        not make_estimator(algorithm).needs_critic,
        f"rollout.segment_tokens={tokens} ends a piece with the critic's value, and algorithm.advantage={algorithm.advantage} "
        "has no critic; set algorithm.advantage=gae or rollout.segment_tokens=null.",
    )
    refuse(
        algorithm.rollouts_per_prompt > 1,
        f"rollout.segment_tokens={tokens} continues every rollout by itself, which would take groups of "
        f"algorithm.rollouts_per_prompt={algorithm.rollouts_per_prompt} apart; set algorithm.rollouts_per_prompt=1 or "
        "rollout.segment_tokens=null.",
    )


def _time_limits(config: Config) -> None:
    limit, watchdog = config.rollout.timeout_s, config.cluster.watchdog_s
    refuse(
        limit >= watchdog,
        f"rollout.timeout_s={limit:g} lets one episode take as long as cluster.watchdog_s={watchdog:g} lets a run stand still; "
        "raise cluster.watchdog_s above it.",
    )


def _score_centering(config: Config) -> None:
    refuse(
        config.algorithm.score_centering and config.rollout.head_size < 1,
        "algorithm.score_centering=true needs the sampler's heads and rollout.head_size=0 asks for none; "
        "raise rollout.head_size, or set algorithm.score_centering=false.",
    )


def _weight_sync(config: Config) -> None:
    mode, sync = config.actor.mode, config.rollout.weight_sync
    refuse(
        mode == "full" and sync in ("merged", "adapter"),
        f"rollout.weight_sync={sync} sends an adapter and actor.mode=full has none; set rollout.weight_sync=full or auto.",
    )
    refuse(
        mode == "lora" and sync == "full" and not serves_other_weights(config.rollout),
        "rollout.weight_sync=full sends weights that actor.mode=lora leaves frozen; set rollout.weight_sync=merged or auto.",
    )


def _devices(config: Config) -> None:
    device, actor = config.cluster.device, config.actor
    refuse(
        device == "cuda" and actor.gpus == 0,
        "cluster.device=cuda puts the learner on a GPU and actor.gpus=0 reserves none; set actor.gpus=1 or cluster.device=cpu.",
    )
    refuse(
        "flash" in config.model.attn_implementation and (actor.gpus == 0 or config.model.dtype == "float32"),
        f"model.attn_implementation={config.model.attn_implementation} runs on GPUs in two-byte numbers, with "
        f"actor.gpus={actor.gpus:g} and model.dtype={config.model.dtype}; set actor.gpus=1 and model.dtype=bfloat16, or "
        "model.attn_implementation=sdpa.",
    )
    refuse(
        device == "cpu" and actor.gpus > 0,
        f"cluster.device=cpu leaves actor.gpus={actor.gpus:g} unused; set actor.gpus=0 or cluster.device=cuda.",
    )
