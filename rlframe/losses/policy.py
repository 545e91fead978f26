"""Policy losses over hidden states: the token losses, corrections and score centering, put together for the fused pass.

`policy_loss` takes tensors; `PolicyLoss` takes a `Batch` and is what sessions run. Token losses are one file each beside this
one; what a correction is lives in `rlframe.corrections`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlframe.alignment import action_rows, trajectory_of
from rlframe.config import AlgorithmConfig, ConfigError
from rlframe.corrections import Rejection, WeightRule, ratio, rejection, sequence_log_ratio, truncation
from rlframe.losses.base import LMHead, LossInputs, LossOutputs, PolicyTokenLoss
from rlframe.losses.cispo import cispo
from rlframe.losses.dis import dis
from rlframe.losses.fused import FusedOutputs, Slopes, fused_loss
from rlframe.losses.policy_metrics import policy_metrics
from rlframe.losses.ppo_clip import ppo_clip
from rlframe.losses.reinforce import WeightedScore, reinforce
from rlframe.score_centering import center, check_heads
from rlframe.validation import check_finite, check_rows, check_vocabulary

POLICY_LOSSES: dict[str, Callable[[AlgorithmConfig], PolicyTokenLoss]] = {
    "reinforce": reinforce,
    "dis": dis,
    "ppo_clip": ppo_clip,
    "cispo": cispo,
}
"""``algorithm.policy_loss`` -> what builds it."""


@dataclass(frozen=True)
class PolicyRules:
    """An `AlgorithmConfig` as the functions that the pass applies.

    Raises:
        ConfigError: the combination is not defined.
    """

    token_loss: PolicyTokenLoss
    sequence_weight: WeightRule | None
    """Rule of the one weight per trajectory."""
    rejection: Rejection | None
    centering: WeightRule | None
    """The token loss's own f, when scores are centred."""
    weighs: bool
    """Whether any importance weight is applied, so that its statistics are worth logging."""

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> PolicyRules:
        """The rules that ``algorithm`` names."""
        if algorithm.policy_loss not in POLICY_LOSSES:
            raise ConfigError(
                f"algorithm.policy_loss={algorithm.policy_loss} is not known; choose one of {', '.join(POLICY_LOSSES)}."
            )
        if algorithm.rollout_is is not None and algorithm.policy_loss != "reinforce":
            raise ConfigError(
                f"algorithm.rollout_is={algorithm.rollout_is} would apply the ratio twice with "
                f"algorithm.policy_loss={algorithm.policy_loss}; set algorithm.rollout_is=null."
            )
        token_loss = POLICY_LOSSES[algorithm.policy_loss](algorithm)
        if algorithm.score_centering and (not isinstance(token_loss, WeightedScore) or algorithm.rollout_is == "sequence"):
            raise ConfigError(
                "algorithm.score_centering=true needs one weight per token that does not depend on the advantage; with "
                f"algorithm.policy_loss={algorithm.policy_loss} and rollout_is={algorithm.rollout_is} set it to false."
            )
        per_sequence = algorithm.rollout_is == "sequence"
        return cls(
            token_loss=token_loss,
            sequence_weight=truncation(algorithm.rollout_is_threshold) if per_sequence else None,
            rejection=rejection(algorithm.rollout_rs, algorithm.rollout_rs_threshold),
            centering=token_loss.rule if algorithm.score_centering and isinstance(token_loss, WeightedScore) else None,
            weighs=algorithm.rollout_is is not None or algorithm.policy_loss != "reinforce",
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


class PolicyObjective:
    """`rlframe.losses.fused.Objective` of a policy loss. Rows of its stats: see `STATS`."""

    STATS = ("loss", "weight", "clipped", "correction", "sampler_mass", "trainer_mass", "coefficient_l1")

    def __init__(self, rules: PolicyRules, data: PolicyTokens, dtype: torch.dtype) -> None:
        self.rules, self.data, self.tokens = rules, data, data.tokens
        self.sampler_logprobs, self.advantages = data.logprobs.to(dtype), data.advantages.to(dtype)
        self.head_ids = None
        if rules.centering is not None:
            if data.head_ids is None or data.head_logprobs is None:
                raise ValueError("Score centering needs head_ids and head_logprobs: the sampler's top-k of every action token.")
            self.head_logprobs = data.head_logprobs.to(dtype)
            self.head_ids = torch.where(self.head_logprobs > -torch.inf, data.head_ids, 0)
        self.has_factors = rules.sequence_weight is not None or rules.rejection is not None
        self.keep: Tensor | None = None
        self.sequence_weights: Tensor | None = None

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
            self.sequence_weights = self.rules.sequence_weight.weight(total)[segments]
            self.sequence_clipped = self.sequence_weights != ratio(total)[segments]
            factors = self.sequence_weights
        if self.rules.rejection is not None:
            self.keep = self.rules.rejection.keep(log_ratio, segments, count)
            factors = torch.where(self.keep, factors, 0.0)
        return factors


def run_policy_loss(
    hidden: Tensor, head: LMHead, data: PolicyTokens, rules: PolicyRules, temperature: float
) -> tuple[PolicyObjective, FusedOutputs]:
    """The fused pass over the hidden states [A, H] that produced the tokens of ``data``."""
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    objective = PolicyObjective(rules, data, dtype)
    return objective, fused_loss(hidden, head, objective, temperature)


class PolicyLoss:
    """The policy loss of an algorithm, as sessions run it.

    The loss is the raw sum over action tokens; divide by the global number of action tokens, those that rejection drops
    included. A micro-batch without action tokens gives a zero loss with zero gradients, since a rank may get none; whoever
    knows the whole batch refuses an empty one (`rlframe.validation.check_batch`).

    Raises:
        ConfigError: the algorithm is not defined, or the temperature is not positive.
    """

    needs = "lm_head"

    def __init__(self, algorithm: AlgorithmConfig, temperature: float = 1.0) -> None:
        if not temperature > 0:
            raise ConfigError(f"rollout.temperature={temperature} cannot be trained on; it must be above 0.")
        self.rules = PolicyRules.of(algorithm)
        self.temperature = temperature

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Loss, metrics, and ``logprobs`` and ``entropy`` of every action token.

        Raises:
            ValueError: shapes differ, advantages are missing or not finite, or a head is not what the sampler returned.
        """
        if inputs.lm_head is None:
            raise ValueError("A policy loss needs the lm_head.")
        batch, hidden = inputs.batch, inputs.hidden
        check_rows(batch, len(hidden), "advantages")
        rows, producers = action_rows(batch)
        check_finite(batch, "advantages", "logprobs")
        if inputs.lm_head.group is None:
            check_vocabulary(batch, len(inputs.lm_head.weight))
        if self.rules.centering is not None:
            check_heads(batch, rows)
        device = hidden.device

        def column(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array[rows]).to(device)

        data = PolicyTokens(
            tokens=column(batch.tokens).long(),
            logprobs=column(batch.logprobs),
            advantages=column(batch.advantages),  # type: ignore[arg-type]
            segments=torch.from_numpy(trajectory_of(batch, rows)).to(device),
            count=len(batch),
            head_ids=column(batch.head_ids) if self.rules.centering else None,
            head_logprobs=column(batch.head_logprobs) if self.rules.centering else None,
        )
        acting = hidden.index_select(0, torch.from_numpy(producers).to(device))
        objective, out = run_policy_loss(acting, inputs.lm_head, data, self.rules, self.temperature)
        scattered = torch.zeros(2, batch.num_tokens, device=device)
        scattered[:, torch.from_numpy(rows).to(device)] = torch.stack([out.logprobs, out.entropy]).float()
        return LossOutputs(out.loss, policy_metrics(objective, out), {"logprobs": scattered[0], "entropy": scattered[1]})
