"""No baseline."""

from __future__ import annotations

import numpy as np

from rlframe.advantages.base import Estimator, per_token, total_rewards
from rlframe.config import AlgorithmConfig
from rlframe.types import Batch


class NoBaseline(Estimator):
    """The total reward itself."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        pass

    def __call__(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Advantages and returns, float32[N] each: the total reward on every action token."""
        rewards = per_token(batch, total_rewards(batch))
        return rewards, rewards.copy()
