"""Running mean: one baseline for all prompts, from past batches."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlframe.advantages.base import Estimator, per_token, total_rewards
from rlframe.config import AlgorithmConfig
from rlframe.types import Batch


class RunningMean(Estimator):
    """Total reward minus an exponential mean of the rewards of past batches, excluding the current batch.

    The first batch has no past, so its own mean is used.
    """

    settings = ("running_mean_decay",)

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self.decay = algorithm.running_mean_decay
        """Weight of the past at every batch, in [0, 1)."""
        self.total = 0.0
        """Weighted sum of the batch means so far."""
        self.weight = 0.0
        """Sum of their weights; dividing by it removes the bias toward 0 of the first batches."""

    def __call__(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Advantages and returns, float32[N] each; updates the running mean with this batch."""
        rewards = total_rewards(batch)
        return per_token(batch, rewards - self.baseline(rewards)), per_token(batch, rewards)

    @property
    def mean(self) -> float:
        """The baseline; NaN before the first batch."""
        return self.total / self.weight if self.weight else float("nan")

    def baseline(self, rewards: np.ndarray) -> float:
        """Return the baseline for a batch with these total rewards [B], then add the batch to the mean."""
        present = float(np.mean(rewards, dtype=np.float64))
        baseline = self.mean if self.weight else present
        self.total = self.decay * self.total + (1 - self.decay) * present
        self.weight = self.decay * self.weight + (1 - self.decay)
        return baseline

    def state_dict(self) -> dict[str, Any]:
        """The past as plain floats, for a checkpoint; the decay is a setting, not a state."""
        return {"total": self.total, "weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict` with the current decay."""
        self.total, self.weight = float(state["total"]), float(state["weight"])
