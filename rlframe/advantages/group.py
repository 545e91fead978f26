"""Group baseline: rollouts of one prompt are compared with each other (GRPO, arXiv 2402.03300)."""

from __future__ import annotations

import numpy as np

from rlframe.advantages.base import Estimator, per_token, total_rewards
from rlframe.config import AlgorithmConfig, ConfigError
from rlframe.types import Batch


class Group(Estimator):
    """Total reward minus the mean of the rollouts of the same prompt; see `group_advantages`."""

    settings = ("normalize_advantages",)

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self.algorithm = algorithm

    def check(self) -> None:
        """Refuse groups of one.

        Raises:
            ConfigError: there is one rollout per prompt.
        """
        if self.algorithm.rollouts_per_prompt < 2:
            raise ConfigError(
                "algorithm.advantage=group compares rollouts of one prompt and algorithm.rollouts_per_prompt=1 gives nothing "
                "to compare with; raise algorithm.rollouts_per_prompt or choose algorithm.advantage=gae."
            )

    def __call__(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Advantages and returns, float32[N] each: the total reward compared with the group's mean."""
        rewards = total_rewards(batch)
        advantages = group_advantages(rewards, batch.indices, self.algorithm.normalize_advantages)
        return per_token(batch, advantages), per_token(batch, rewards)


def group_advantages(rewards: np.ndarray, groups: np.ndarray, normalize: bool = False) -> np.ndarray:
    """Reward minus the mean reward of the group, over its standard deviation if asked (GRPO, arXiv 2402.03300).

    Args:
        rewards: float[B], total reward of every trajectory.
        groups: int[B], equal within a group.
        normalize: divide by the sample standard deviation (n - 1); a group without spread gets 0.

    Returns:
        float64[B]; a group of one gets 0.
    """
    _, member, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    rewards = np.asarray(rewards, np.float64)
    centred = rewards - (np.bincount(member, weights=rewards) / sizes)[member]
    if not normalize:
        return centred
    spread = np.sqrt(np.bincount(member, weights=centred**2) / np.maximum(sizes - 1, 1))[member]
    return np.divide(centred, spread, out=np.zeros_like(centred), where=spread > 1e-6)
