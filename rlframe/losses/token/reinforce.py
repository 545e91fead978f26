"""REINFORCE in bypass mode, with any weight rule: L = -A sg[f(r)] log p. DIS and CISPO are this loss with their own f."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from rlframe.config import AlgorithmConfig
from rlframe.losses.base import TokenTerms
from rlframe.losses.corrections import Unweighted, WeightRule, ratio, truncation


@dataclass(frozen=True)
class Reinforce:
    """L = -A sg[f(r)] log p, r = p / q. The factor is detached, so r enters exactly once.

    With f = 1 and weights in the place of A this is cross entropy, -w log p.
    """

    level: ClassVar[Literal["token"]] = "token"
    settings: ClassVar[tuple[str, ...]] = ()
    rule: WeightRule = field(default_factory=Unweighted)
    """f"""

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> Self:
        """f is TIS or IcePop with token weights, else 1 (also with sequence weights, which multiply whole trajectories)."""
        return cls(truncation(algorithm.rollout_is_threshold) if algorithm.rollout_is == "token" else Unweighted())

    @property
    def centering(self) -> WeightRule:
        """f itself."""
        return self.rule

    def __call__(self, logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor) -> TokenTerms:
        log_ratio = logprobs - sampler_logprobs
        weight = self.rule.weight(log_ratio).detach()
        slope = -advantages * weight
        # A token without weight counts 0, also where its log-probability is -inf.
        loss = torch.where(slope == 0, 0.0, slope * logprobs)
        if isinstance(self.rule, Unweighted):
            return TokenTerms(loss, slope)
        return TokenTerms(loss, slope, weight, weight != ratio(log_ratio))
