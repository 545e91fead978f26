"""Advantages and returns. `base` has the protocol, `registry` the names; every other module is one estimator."""

from __future__ import annotations

from rlframe.advantages.base import Estimator, compute_advantages, per_token, total_rewards
from rlframe.advantages.gae import action_rewards, adaptive_lambda, discounted_sums, skip_observation_gae
from rlframe.advantages.group import group_advantages
from rlframe.advantages.registry import ESTIMATORS, check_advantage, make_estimator

__all__ = [
    "ESTIMATORS",
    "Estimator",
    "action_rewards",
    "adaptive_lambda",
    "check_advantage",
    "compute_advantages",
    "discounted_sums",
    "group_advantages",
    "make_estimator",
    "per_token",
    "skip_observation_gae",
    "total_rewards",
]
