"""The objective of a policy loss for the fused pass: its loss, weights, rejection and the resulting slopes.

See `rlframe.losses.token` and `rlframe.losses.sequence` for the losses themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rlframe.config import AlgorithmConfig
from rlframe.losses.base import SequenceLoss, TokenLoss, TokenTerms
from rlframe.losses.checks import check_algorithm
from rlframe.losses.corrections import Rejection, WeightRule, ratio, rejection, truncation
from rlframe.losses.fused import Afterwards, Slopes
from rlframe.losses.registry import make_policy_loss
from rlframe.losses.score_centering import center
from rlframe.losses.sequences import Sequences


@dataclass(frozen=True)
class PolicyRules:
    """A point in the space of policy losses: an `AlgorithmConfig` as the functions that are applied."""

    loss: TokenLoss | SequenceLoss
    sequence_weight: WeightRule | None
    """Rule of the one weight per trajectory; None without."""
    rejection: Rejection | None
    """What is dropped; None keeps everything."""
    centering: WeightRule | None
    """The loss's own f, when scores are centred."""

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> PolicyRules:
        """Build the rules that ``algorithm`` names.

        Raises:
            ConfigError: the combination is not defined.
        """
        check_algorithm(algorithm)
        loss = make_policy_loss(algorithm)
        return cls(
            loss=loss,
            sequence_weight=truncation(algorithm.rollout_is_threshold) if algorithm.rollout_is == "sequence" else None,
            rejection=rejection(algorithm.rollout_rs, algorithm.rollout_rs_threshold),
            centering=loss.centering if algorithm.score_centering else None,
        )


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
    columns: dict[str, Tensor] = field(default_factory=dict)
    """[A] each, what else the loss reads."""

    def to(self, dtype: torch.dtype) -> PolicyTokens:
        """The same with log-probabilities, advantages and other real numbers in ``dtype``, what the pass computes in."""
        head = None if self.head_logprobs is None else self.head_logprobs.to(dtype)
        logprobs, advantages = self.logprobs.to(dtype), self.advantages.to(dtype)
        columns = {name: each.to(dtype) if each.is_floating_point() else each for name, each in self.columns.items()}
        return replace(self, logprobs=logprobs, advantages=advantages, head_logprobs=head, columns=columns)


class PolicyObjective:
    """`rlframe.losses.fused.Objective` of a policy loss.

    Its statistics, each where it applies: ``weight`` and ``clipped`` of the importance weights before rejection, ``kept`` by
    rejection; with centering ``correction`` sum_H c log p, ``sampler_mass``, ``trainer_mass`` and ``coefficient_l1``.
    """

    def __init__(self, rules: PolicyRules, data: PolicyTokens) -> None:
        """``data`` in the dtype that the pass computes in.

        Raises:
            ValueError: scores are to be centred, but there are no heads.
        """
        self.rules, self.data, self.tokens = rules, data, data.tokens
        self.whole = rules.loss.level == "sequence" or rules.sequence_weight is not None or rules.rejection is not None
        self.head_ids: Tensor | None = None
        if rules.centering is not None:
            if data.head_ids is None or data.head_logprobs is None:
                raise ValueError("Score centering needs head_ids and head_logprobs: the sampler's top-k of every action token.")
            self.head_logprobs = data.head_logprobs
            self.head_ids = torch.where(self.head_logprobs > -torch.inf, data.head_ids, 0)

    def slopes(self, rows: slice, logprobs: Tensor, head_logprobs: Tensor) -> Slopes:
        """Token loss of a chunk, minus the expected score under the sampler where scores are centred."""
        loss, advantages = self.rules.loss, self.data.advantages[rows]
        if loss.level == "sequence":  # `afterwards` has its slopes
            return Slopes(torch.ones_like(logprobs), None, torch.zeros_like(logprobs), {})
        more = {name: column[rows] for name, column in self.data.columns.items()}
        token = loss(logprobs, self.data.logprobs[rows], advantages, **more)
        stats = _weight_stats(token)
        if self.rules.centering is None:
            return Slopes(token.slope, None, token.loss, stats)
        centering = center(self.rules.centering, head_logprobs, self.head_logprobs[rows])
        stats["correction"] = (centering.coefficients * head_logprobs).sum(1)
        stats["sampler_mass"], stats["trainer_mass"] = centering.sampler_mass, centering.trainer_mass
        stats["coefficient_l1"] = centering.coefficients.abs().sum(1)
        head = advantages.unsqueeze(1) * centering.coefficients
        return Slopes(token.slope, head, token.loss + advantages * stats["correction"], stats)

    def afterwards(self, logprobs: Tensor) -> Afterwards:
        """The loss or the weight of whole trajectories, and 0 for what is rejected; rejection comes after weights."""
        data, rules, loss = self.data, self.rules, self.rules.loss
        sequences = Sequences(data.segments, data.count)
        log_ratio = logprobs - data.logprobs
        factors, each, stats = torch.ones_like(log_ratio), None, {}
        if loss.level == "sequence":
            terms = loss(logprobs, data.logprobs, data.advantages, sequences, **data.columns)
            factors, each, stats = terms.slope, terms.loss, _weight_stats(terms)
        elif rules.sequence_weight is not None:
            total = sequences.sum(log_ratio)
            weight = rules.sequence_weight.weight(total)
            factors = sequences.spread(weight)
            stats = {"weight": factors, "clipped": sequences.spread(weight != ratio(total))}
        if rules.rejection is not None:
            kept = rules.rejection.keep(log_ratio, data.segments, data.count)
            factors = torch.where(kept, factors, 0.0)
            each = None if each is None else torch.where(kept, each, 0.0)
            stats["kept"] = kept
        return Afterwards(factors, each, stats)


def _weight_stats(terms: TokenTerms) -> dict[str, Tensor]:
    stats = {"weight": terms.weight, "clipped": terms.clipped}
    return {name: column for name, column in stats.items() if column is not None}
