"""Advantages and returns."""

from __future__ import annotations

from rlframe.advantages.estimators import (
    RunningMean,
    action_rewards,
    adaptive_lambda,
    compute_advantages,
    discounted_sums,
    group_advantages,
    skip_observation_gae,
)

__all__ = [
    "RunningMean",
    "action_rewards",
    "adaptive_lambda",
    "compute_advantages",
    "discounted_sums",
    "group_advantages",
    "skip_observation_gae",
]
