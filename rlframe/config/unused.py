"""Which settings have no effect in a job, so that giving one is refused instead of ignored."""

from __future__ import annotations

from collections.abc import Collection

from rlframe.config import Config
from rlframe.config.task_checks import GENERATED_TASKS, unused_by_task

REWARD_SETTINGS = ("reward_workers", "reward_timeout_s", "reward_startup_timeout_s", "reward_memory_mb", "on_reward_failure")
"""Settings of ``task.reward``, which generated tasks do without."""


def unused(config: Config) -> dict[str, str]:
    """Settings (or sections) without effect in this job -> the reason, to complete "... has no effect"."""
    from rlframe.losses.registry import settings_of  # needs torch

    a = config.algorithm
    clips = {"clip_low", "clip_high", "clip_dual"}.difference(settings_of(a.policy_loss))
    rules: list[tuple[bool, str, Collection[str]]] = [
        (
            a.advantage != "gae",
            f"with algorithm.advantage={a.advantage}, which has no critic",
            ("critic", "algorithm.gamma", "algorithm.lambda_critic", "algorithm.lambda_policy", "algorithm.lambda_alpha"),
        ),
        (a.advantage != "running_mean", f"with algorithm.advantage={a.advantage}", ("algorithm.running_mean_decay",)),
        (True, f"with algorithm.policy_loss={a.policy_loss}", [f"algorithm.{key}" for key in clips]),
        (a.rollout_is is None, "with algorithm.rollout_is=null", ("algorithm.rollout_is_threshold",)),
        (a.lambda_policy != "adaptive", "with a fixed algorithm.lambda_policy", ("algorithm.lambda_alpha",)),
        (
            config.task.name in GENERATED_TASKS and config.task.name != "reasoning_gym",
            f"with task.name={config.task.name}, which rewards answers itself",
            [f"task.{key}" for key in REWARD_SETTINGS],
        ),
        *unused_by_task(config.task),
        (
            config.rollout.engine != "sglang",
            f"with rollout.engine={config.rollout.engine}",
            ("rollout.server_urls", "rollout.weights_dir"),
        ),
        (config.actor.mode == "full", "with actor.mode=full", ("actor.lora",)),
        (config.critic.mode == "full", "with critic.mode=full", ("critic.lora",)),
    ]
    return {key: reason for applies, reason, keys in rules if applies for key in keys}
