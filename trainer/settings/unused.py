"""Which settings have no effect in a job, so that giving one is refused instead of ignored."""

from __future__ import annotations

from collections.abc import Collection

from rlframe.config import Config
from workers.engines.checks import unused_by_engine
from workers.environments.settings import unused_by_task


def unused(config: Config) -> dict[str, str]:
    """Settings (or sections) without effect in this job -> the reason, to complete "... has no effect"."""
    a = config.algorithm
    rules: list[tuple[bool, str, Collection[str]]] = [
        (
            a.advantage != "gae",
            f"with algorithm.advantage={a.advantage}, which has no critic",
            ("critic", "algorithm.gamma", "algorithm.lambda_critic", "algorithm.lambda_policy", "algorithm.lambda_alpha"),
        ),
        (a.advantage != "running_mean", f"with algorithm.advantage={a.advantage}", ("algorithm.running_mean_decay",)),
        (a.policy_loss == "reinforce", "with algorithm.policy_loss=reinforce", ("algorithm.clip_low", "algorithm.clip_high")),
        (a.policy_loss != "ppo_clip", f"with algorithm.policy_loss={a.policy_loss}", ("algorithm.clip_dual",)),
        (a.rollout_is is None, "with algorithm.rollout_is=null", ("algorithm.rollout_is_threshold",)),
        (a.lambda_policy != "adaptive", "with a fixed algorithm.lambda_policy", ("algorithm.lambda_alpha",)),
        *unused_by_task(config.task),
        *unused_by_engine(config.rollout),
        (config.actor.mode == "full", "with actor.mode=full", ("actor.lora",)),
        (config.critic.mode == "full", "with critic.mode=full", ("critic.lora",)),
    ]
    return {key: reason for applies, reason, keys in rules if applies for key in keys}
