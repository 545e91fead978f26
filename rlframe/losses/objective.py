"""The objective of a policy loss for the fused pass: slopes of every token, and factors of whole trajectories."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlframe.losses.corrections import ratio, sequence_log_ratio
from rlframe.losses.fused import Slopes
from rlframe.losses.rules import PolicyRules
from rlframe.losses.score_centering import center


@dataclass
class PolicyTokens:
    """The A action tokens of some trajectories, on one device."""

    tokens: Tensor
    """int64[A]"""
    logprobs: Tensor
    """[A], the sampler's, nats."""
    advantages: Tensor
    """[A]"""
    segments: Tensor
    """int64[A], trajectory of each token, in [0, count)."""
    count: int
    """Trajectories."""
    head_ids: Tensor | None = None
    """int[A, k]"""
    head_logprobs: Tensor | None = None
    """[A, k], -inf in padded entries."""


class PolicyObjective:
    """`rlframe.losses.fused.Objective` of a policy loss; `STATS` names the rows of its stats (the last four with centering)."""

    STATS = ("loss", "weight", "clipped", "correction", "sampler_mass", "trainer_mass", "coefficient_l1")

    def __init__(self, rules: PolicyRules, data: PolicyTokens, dtype: torch.dtype) -> None:
        """``dtype``: fp32 or fp64, what the pass computes in.

        Raises:
            ValueError: scores are to be centred, but there are no heads.
        """
        self.rules, self.data, self.tokens = rules, data, data.tokens
        self.sampler_logprobs, self.advantages = data.logprobs.to(dtype), data.advantages.to(dtype)
        self.has_factors = rules.sequence_weight is not None or rules.rejection is not None
        self.head_ids: Tensor | None = None
        if rules.centering is not None:
            if data.head_ids is None or data.head_logprobs is None:
                raise ValueError("Score centering needs head_ids and head_logprobs: the sampler's top-k of every action token.")
            self.head_logprobs = data.head_logprobs.to(dtype)
            self.head_ids = torch.where(self.head_logprobs > -torch.inf, data.head_ids, 0)
        self.kept: Tensor | None = None
        """bool[A] after the pass, with rejection."""
        self.sequence_weights: tuple[Tensor, Tensor] | None = None
        """After the pass, with sequence weights: [A] the weight of the token's trajectory, and bool[A] where it was bounded."""

    def slopes(self, rows: slice, logprobs: Tensor, head_logprobs: Tensor) -> Slopes:
        """Token loss of a chunk, minus the expected score under the sampler where scores are centred."""
        advantages = self.advantages[rows]
        token = self.rules.token_loss(logprobs, self.sampler_logprobs[rows], advantages)
        stats = [token.loss, token.weight, token.clipped.to(token.loss.dtype)]
        if self.rules.centering is None:
            return Slopes(token.slope, None, torch.stack(stats))
        centering = center(self.rules.centering, head_logprobs, self.head_logprobs[rows])
        correction = (centering.coefficients * head_logprobs).sum(1)
        stats[0] = token.loss + advantages * correction
        stats += [correction, centering.sampler_mass, centering.trainer_mass, centering.coefficients.abs().sum(1)]
        return Slopes(token.slope, advantages.unsqueeze(1) * centering.coefficients, torch.stack(stats))

    def factors(self, logprobs: Tensor) -> Tensor:
        """Weight of the trajectory, and 0 for what is rejected; weights are computed before rejection."""
        log_ratio = logprobs - self.sampler_logprobs
        segments, count = self.data.segments, self.data.count
        factors = torch.ones_like(log_ratio)
        if self.rules.sequence_weight is not None:
            total = sequence_log_ratio(log_ratio, segments, count)
            weight = self.rules.sequence_weight.weight(total)
            factors = weight[segments]
            self.sequence_weights = factors, (weight != ratio(total))[segments]
        if self.rules.rejection is not None:
            self.kept = self.rules.rejection.keep(log_ratio, segments, count)
            factors = torch.where(self.kept, factors, 0.0)
        return factors
