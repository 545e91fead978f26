"""Score centering: subtract the sampler's expected score from every score (Marek and Ryabinin 2026, arXiv 2609.20807).

With q the sampler and p the trainer, E_q[A s] = E_q[A] E_q[s] + Cov_q(A, s) for the score s = grad log p. The first term is
a drift toward the sampler that vanishes only when q = p; subtracting E_q[s] leaves the covariance. The expectation runs over
the sampler's top-k head H exactly, and over the tail under the model q = rho p.

Here: the coefficients and the checks of the heads. The pass that turns them into gradients is `rlframe.losses.fused`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlframe.losses.corrections import WeightRule
from rlframe.topk import topk_fault
from rlframe.types import Batch

TAIL_FLOOR = 1e-6
"""1 - sum_H p is rounding noise (or negative) below about 1e-6 in fp32 when the head holds nearly all the mass."""


class Centering(NamedTuple):
    """What the head contributes to one token's score."""

    coefficients: Tensor
    """[C, k], c_v = q_v f(p_v / q_v) - alpha p_v; 0 in padded entries."""
    sampler_mass: Tensor
    """[C], sum_H q."""
    trainer_mass: Tensor
    """[C], sum_H p."""


def center(rule: WeightRule, trainer_logprobs: Tensor, sampler_logprobs: Tensor) -> Centering:
    """Coefficients of the expected score under the sampler (equations 8 and 14 of the paper).

    With rho = q_tail / p_tail and alpha = rho f(1 / rho), the tail being modelled as q = rho p, the expected weighted score
    sum_v q_v f(p_v / q_v) grad log p_v equals sum_H c_v grad log p_v because sum_v p_v grad log p_v = 0.

    Args:
        rule: f, the same rule that weights the sampled token.
        trainer_logprobs: [C, k], log p_v of the head's tokens, nats.
        sampler_logprobs: [C, k], log q_v, normalised over the full vocabulary; -inf marks a padded entry.

    Returns:
        Detached coefficients and head masses.
    """
    trainer_logprobs = trainer_logprobs.detach()
    q = sampler_logprobs.exp()
    p = torch.where(sampler_logprobs > -torch.inf, trainer_logprobs.exp(), 0.0)
    sampler_mass, trainer_mass = q.sum(-1), p.sum(-1)
    q_tail = (1 - sampler_mass).clamp(min=TAIL_FLOOR)
    p_tail = (1 - trainer_mass).clamp(min=TAIL_FLOOR)
    # alpha = rho f(1 / rho) is the same product form, with "p" = 1 and "q" = rho.
    rho = q_tail / p_tail
    alpha = rule.product(torch.ones_like(rho), rho, -rho.log())
    weighted = rule.product(p, q, trainer_logprobs - sampler_logprobs)
    return Centering(weighted - alpha.unsqueeze(-1) * p, sampler_mass, trainer_mass)


def check_topk(batch: Batch, rows: np.ndarray) -> None:
    """Refuse heads that cannot be the sampler's top-k of the action tokens ``rows``.

    A head that is shifted by one row is detectable: the sampled token's log-probability in the head differs from its own, or
    the token is missing from the head although it is likelier than what the head holds.

    Raises:
        ValueError: no head at all, an action token without one, or a head that is shifted, duplicated, over-full or not a
            log-probability. The message names the trajectory.
    """
    if not batch.head_ids.shape[1]:
        raise ValueError(
            f"{batch.name(0)}: it has no heads (head_ids has width 0), but score centering needs the sampler's top-k."
        )
    if not len(rows):
        return
    ids, logprobs = batch.head_ids[rows], batch.head_logprobs[rows]
    found = topk_fault(batch.tokens[rows], batch.logprobs[rows], ids, logprobs, required=True)
    if found is not None:
        row = int(rows[found[0]])
        b = int(np.searchsorted(batch.offsets, row, side="right")) - 1
        raise ValueError(f"{batch.name(b)}: action token {row - int(batch.offsets[b])} {found[1]}.")
