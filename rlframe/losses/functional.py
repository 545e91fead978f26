"""Tensors in, loss out: the losses for other trainers, without `Batch` or sessions.

All tensors hold action tokens only, concatenated. From padded hidden states [B, T, H] of tokens [B, T] with mask [B, T], the
states that produced the action tokens are ``hidden[:, :-1][mask[:, 1:]]`` and the tokens ``tokens[:, 1:][mask[:, 1:]]``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlframe.config import AlgorithmConfig
from rlframe.losses.base import LMHead
from rlframe.losses.objective import PolicyRules, PolicyTokens
from rlframe.losses.policy import run_policy_loss
from rlframe.losses.value import squared_errors
from rlframe.metrics import Metrics
from rlframe.precision import full_precision
from rlframe.topk import MASS_TOLERANCE, topk_fault


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
        segments: int[A], the trajectory of each token, non-decreasing, at least 0; by default all tokens are one trajectory.
        head_ids: int[A, k], the sampler's top-k (or any tokens that do not depend on what was sampled), with score centering.
        head_logprobs: [A, k], nats, normalised over the full vocabulary; -inf in padded entries.
        temperature: what the sampler divided its logits by.

    Raises:
        ConfigError: the algorithm is not defined.
        ValueError: shapes differ, there is no token, a value is not finite, an id is outside of the vocabulary, segments go
            down, a log-probability is positive, the temperature is not, or heads are missing or cannot be the sampler's.
    """
    count = tokens.numel()
    if not count:
        raise ValueError("policy_loss needs at least one action token.")
    segments = torch.zeros_like(tokens, dtype=torch.int64) if segments is None else segments
    head = lm_head if isinstance(lm_head, LMHead) else LMHead(lm_head)
    vocabulary = head.vocabulary()
    _check_tokens(tokens, logprobs, advantages, segments, vocabulary)
    rules = PolicyRules.of(algorithm)
    if head_ids is not None or rules.centering is not None:
        _check_heads(tokens, logprobs, segments, head_ids, head_logprobs, vocabulary, used=rules.centering is not None)
    data = PolicyTokens(
        tokens.long(),
        logprobs,
        advantages,
        segments.long(),
        int(segments.max()) + 1,
        head_ids=head_ids,
        head_logprobs=head_logprobs,
    )
    out, metrics = run_policy_loss(hidden, head, data, rules, temperature)
    return PolicyLossOutputs(out.loss, out.logprobs, out.entropy, metrics)


def _check_tokens(tokens: Tensor, logprobs: Tensor, advantages: Tensor, segments: Tensor, vocabulary: int) -> None:
    count = tokens.numel()
    for name, tensor in (("tokens", tokens), ("logprobs", logprobs), ("advantages", advantages), ("segments", segments)):
        if tensor.shape != (count,):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected ({count},).")
    for name, tensor in (("tokens", tokens), ("segments", segments)):
        if tensor.is_floating_point():
            raise ValueError(f"{name} must be whole numbers, not {tensor.dtype}.")
    previous = torch.cat([segments.new_zeros(1), segments[:-1]])
    for bad, what in (
        (~logprobs.isfinite(), "logprobs is not finite"),
        (logprobs > MASS_TOLERANCE, "logprobs has a positive value"),
        (~advantages.isfinite(), "advantages is not finite"),
        (segments < previous, "segments go down, or begin below 0,"),
        ((tokens < 0) | (tokens >= vocabulary), f"tokens has an id outside of the vocabulary of {vocabulary}"),
    ):
        if bad.any():
            where = int(bad.nonzero()[0])
            raise ValueError(f"{what} at token {where} (trajectory {int(segments[where])}).")


def _check_heads(
    tokens: Tensor,
    logprobs: Tensor,
    segments: Tensor,
    ids: Tensor | None,
    head_logprobs: Tensor | None,
    vocabulary: int,
    *,
    used: bool,
) -> None:
    if ids is None or head_logprobs is None:
        raise ValueError("Score centering needs head_ids and head_logprobs: the sampler's top-k of every action token.")
    if ids.shape != head_logprobs.shape or ids.shape[:-1] != tokens.shape or not ids.shape[-1]:
        raise ValueError(f"head_ids {tuple(ids.shape)} and head_logprobs must both have shape ({len(tokens)}, k).")
    if ids.is_floating_point():
        raise ValueError(f"head_ids must be whole numbers, not {ids.dtype}.")
    if not used:
        return
    columns = (tokens, logprobs.double(), ids, head_logprobs.double())
    fault = topk_fault(*(column.detach().cpu().numpy() for column in columns), required=True, likeliest=False)
    outside = ((ids >= vocabulary) & (head_logprobs > -torch.inf)).any(1)
    if fault is None and outside.any():
        fault = int(outside.nonzero()[0]), f"has an id outside of the vocabulary of {vocabulary} in head_ids"
    if fault is not None:
        raise ValueError(f"Token {fault[0]} (trajectory {int(segments[fault[0]])}) {fault[1]}.")


@full_precision()
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
        ValueError: shapes differ, there is no value, one is not finite, or ``clip_range`` without ``old_values``.
    """
    if not values.numel():
        raise ValueError("value_loss needs at least one value.")
    for name, tensor in (("values", values), ("returns", returns), ("old_values", old_values)):
        if tensor is not None and not tensor.isfinite().all():
            raise ValueError(f"{name} is not finite at token {int((~tensor.isfinite()).flatten().nonzero()[0])}.")
    return 0.5 * vf_coef * squared_errors(values, returns, old_values, clip_range)[0].sum()
