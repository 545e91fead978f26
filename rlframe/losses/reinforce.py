"""REINFORCE in bypass mode, with any weight rule: L = -A sg[f(r)] log p. DIS and CISPO are this loss with their own f."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlframe.config import AlgorithmConfig
from rlframe.losses.base import TokenLoss
from rlframe.losses.corrections import Unweighted, WeightRule, ratio, truncation


@dataclass(frozen=True)
class WeightedScore:
    """L = -A sg[f(r)] log p, r = p / q. The factor is detached, so r enters exactly once."""

    rule: WeightRule
    """f"""

    @property
    def centering(self) -> WeightRule:
        """f itself."""
        return self.rule

    def __call__(self, logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor) -> TokenLoss:
        log_ratio = logprobs - sampler_logprobs
        weight = self.rule.weight(log_ratio)
        clipped = weight != (weight if isinstance(self.rule, Unweighted) else ratio(log_ratio))
        slope = -advantages * weight
        return TokenLoss(slope * logprobs, slope, weight, clipped)


def reinforce(algorithm: AlgorithmConfig) -> WeightedScore:
    """f is 1 without token weights (also with sequence weights, which multiply whole trajectories), TIS or IcePop with them."""
    if algorithm.rollout_is == "token":
        return WeightedScore(truncation(algorithm.rollout_is_threshold))
    return WeightedScore(Unweighted())
