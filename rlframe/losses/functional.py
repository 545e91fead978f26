"""Tensors in, loss out: the losses for people with a trainer of their own, without `Batch` or sessions.

All tensors hold action tokens only, concatenated. From padded hidden states [B, T, H] of tokens [B, T] with mask [B, T], the
states that produced the action tokens are ``hidden[:, :-1][mask[:, 1:]]`` and the tokens ``tokens[:, 1:][mask[:, 1:]]``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlframe.config import AlgorithmConfig
from rlframe.losses.base import LMHead
from rlframe.losses.objective import PolicyTokens
from rlframe.losses.policy import run_policy_loss
from rlframe.losses.policy_metrics import policy_metrics
from rlframe.losses.rules import PolicyRules
from rlframe.losses.value import squared_errors
from rlframe.metrics import Metrics


class PolicyLossOutputs(NamedTuple):
    """Result of `policy_loss`."""

    loss: Tensor
    """Scalar sum over the action tokens; divide by their (global) number."""
    logprobs: Tensor
    """[A], the trainer's, nats, detached."""
    entropy: Tensor
    """[A], nats, detached."""
    metrics: Metrics
    """Mergeable sums."""


def policy_loss(
    hidden: Tensor,
    lm_head: LMHead | Tensor,
    tokens: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    algorithm: AlgorithmConfig,
    *,
    segments: Tensor | None = None,
    head_ids: Tensor | None = None,
    head_logprobs: Tensor | None = None,
    temperature: float = 1.0,
) -> PolicyLossOutputs:
    """The policy loss of ``algorithm`` in one fused pass, with gradients for ``hidden`` and, if it requires one, ``lm_head``.

    Args:
        hidden: [A, H], the states that produced the tokens, any float dtype; computed in fp32 (fp64 if it is fp64).
        lm_head: weight [V, H], or an `LMHead` with bias, soft cap or vocabulary sharding.
        tokens: int[A], the sampled tokens.
        logprobs: [A], the sampler's log-probabilities, nats, over the same temperature.
        advantages: [A]
        algorithm: policy_loss, rollout_is, rollout_rs, score_centering and their settings are used.
        segments: int[A], the trajectory of each token, non-decreasing from 0; by default all tokens are one trajectory.
        head_ids: int[A, k], the sampler's top-k, with score centering.
        head_logprobs: [A, k], nats, normalised over the full vocabulary; -inf in padded entries.
        temperature: what the sampler divided its logits by.

    Raises:
        ConfigError: the algorithm is not defined.
        ValueError: shapes differ, there is no token, a value is not finite, or score centering lacks heads.
    """
    count = tokens.numel()
    if not count:
        raise ValueError("policy_loss needs at least one action token.")
    segments = torch.zeros_like(tokens, dtype=torch.int64) if segments is None else segments.long()
    for name, tensor in (("tokens", tokens), ("logprobs", logprobs), ("advantages", advantages), ("segments", segments)):
        if tensor.shape != (count,):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected ({count},).")
    for name, tensor in (("logprobs", logprobs), ("advantages", advantages)):
        if not tensor.isfinite().all():
            where = int((~tensor.isfinite()).nonzero()[0])
            raise ValueError(f"{name} is not finite at token {where} (trajectory {int(segments[where])}).")
    head = lm_head if isinstance(lm_head, LMHead) else LMHead(lm_head)
    if head.group is None and not 0 <= int(tokens.min()) <= int(tokens.max()) < len(head.weight):
        raise ValueError(f"tokens has an id outside of the vocabulary of {len(head.weight)} entries.")
    if head_ids is not None and (
        head_logprobs is None or head_ids.shape != head_logprobs.shape or head_ids.shape[:1] != (count,)
    ):
        raise ValueError(f"head_ids {tuple(head_ids.shape)} and head_logprobs must both have shape ({count}, k).")
    rules = PolicyRules.of(algorithm)
    data = PolicyTokens(
        tokens.long(), logprobs, advantages, segments, int(segments.max()) + 1, head_ids=head_ids, head_logprobs=head_logprobs
    )
    objective, out = run_policy_loss(hidden, head, data, rules, temperature)
    return PolicyLossOutputs(out.loss, out.logprobs, out.entropy, policy_metrics(objective, out))


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor | None = None, *, vf_coef: float = 1.0, clip_range: float | None = None
) -> Tensor:
    """0.5 * vf_coef * sum of (V - R)^2, or with ``clip_range`` of the larger of the plain and the clipped error.

    Args:
        values: [A], the critic's, fp32, with gradient.
        returns: [A], targets.
        old_values: [A], values before the update, with ``clip_range``.
        vf_coef: factor of the loss.
        clip_range: how far a value may leave the old one.

    Raises:
        ValueError: shapes differ, there is no value, or ``clip_range`` without ``old_values``.
    """
    if not values.numel():
        raise ValueError("value_loss needs at least one value.")
    return 0.5 * vf_coef * squared_errors(values, returns, old_values, clip_range)[0].sum()
