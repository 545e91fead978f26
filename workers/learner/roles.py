"""Which sessions the learner of a run has, by name; `workers.learner.sessions` defines each of them."""

from __future__ import annotations

from rlframe.advantages import make_estimator
from workers.settings import Config


def critic_names(config: Config) -> tuple[str, ...]:
    """Names of the critic sessions; none where the advantage needs no critic."""
    if not make_estimator(config.algorithm).needs_critic:
        return ()
    return tuple(f"critic_{i}" for i in range(config.critic.ensemble))
