"""Which settings have no effect in a job, so that giving one is refused instead of ignored."""

from __future__ import annotations

from collections.abc import Collection

from rlframe.advantages import make_estimator
from rlframe.advantages.registry import unused_settings
from trainer.settings.config import Config
from workers.engines.checks import unused_by_engine
from workers.environments.task_checks import unused_by_task


def unused(config: Config) -> dict[str, str]:
    """Settings (or sections) without effect in this job -> the reason, to complete "... has no effect"."""
    from rlframe.losses import registry as losses  # needs torch

    a, estimator = config.algorithm, make_estimator(config.algorithm)
    advantage, loss = f"with algorithm.advantage={a.advantage}", f"with algorithm.policy_loss={a.policy_loss}"
    rules: list[tuple[bool, str, Collection[str]]] = [
        (not estimator.needs_critic, f"{advantage}, which has no critic", ("critic",)),
        (True, advantage, [f"algorithm.{name}" for name in unused_settings(estimator)]),
        (True, loss, [f"algorithm.{name}" for name in losses.unused_settings(a.policy_loss)]),
        (a.rollout_is is None, "with algorithm.rollout_is=null", ("algorithm.rollout_is_threshold",)),
        (a.lambda_policy != "adaptive", "with a fixed algorithm.lambda_policy", ("algorithm.lambda_alpha",)),
        *unused_by_task(config.task),
        *unused_by_engine(config.rollout),
        (config.actor.mode == "full", "with actor.mode=full", ("actor.lora",)),
        (config.critic.mode == "full", "with critic.mode=full", ("critic.lora",)),
    ]
    return {key: reason for applies, reason, keys in rules if applies for key in keys}
