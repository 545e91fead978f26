"""Gradients of the centred policy loss: the exact one from both whole distributions, and the one that a top-k head gives.

With p the trainer, q the sampler, r_v = p_v / q_v and weights f, a token y with advantage 1 has the loss gradient

    dL/dz = -(f(r_y) (e_y - p) - sum_v q_v f(r_v) (e_v - p))

in the logits z. `exact` is that line in float64. `from_head` takes the coefficients of
`rlframe.losses.score_centering.center`, the code that training runs. Nothing here reads runs or draws.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlframe.alignment import action_rows
from rlframe.config import AlgorithmConfig
from rlframe.losses.base import LMHead, LossInputs
from rlframe.losses.objective import PolicyRules
from rlframe.losses.policy import PolicyLoss
from rlframe.losses.score_centering import center
from rlframe.sessions import Session
from rlframe.types import Batch

RULES: dict[str, tuple[dict, Callable[[Tensor], Tensor]]] = {
    "none": ({}, torch.ones_like),
    "TIS": ({"rollout_is": "token", "rollout_is_threshold": 2.0}, lambda r: r.clamp(max=2.0)),
    "IcePop": (
        {"rollout_is": "token", "rollout_is_threshold": [0.5, 5.0]},
        lambda r: torch.where((r >= 0.5) & (r <= 5.0), r, 0.0),
    ),
}
"""Weights by name: the settings of the preset, and f written out."""


def algorithm(rule: str, centred: bool) -> AlgorithmConfig:
    """The policy loss of ``bypass_pg`` and its kin."""
    return AlgorithmConfig(score_centering=centred, advantage="none", **RULES[rule][0])


def exact(rule: str, log_p: Tensor, log_q: Tensor, tokens: Tensor) -> Tensor:
    """float64[A, V], dL/dz of every token with advantage 1, centred over the whole vocabulary.

    Args:
        rule: a name in `RULES`.
        log_p: float64[A, V], the trainer's log-probabilities.
        log_q: float64[A, V], the sampler's.
        tokens: int64[A], sampled.
    """
    p, expected = log_p.exp(), log_q.exp() * RULES[rule][1]((log_p - log_q).exp())
    return expected - expected.sum(1, keepdim=True) * p - _uncentred(rule, log_p, log_q, tokens)


def from_head(rule: str, log_p: Tensor, log_q: Tensor, tokens: Tensor, k: int) -> Tensor:
    """The same from the sampler's k likeliest tokens; k = 0: not centred at all."""
    plain = -_uncentred(rule, log_p, log_q, tokens)
    if k == 0:
        return plain
    head = log_q.topk(k)
    f = PolicyRules.of(algorithm(rule, centred=True)).centering
    assert f is not None
    c = center(f, log_p.gather(1, head.indices), head.values).coefficients
    return (plain - c.sum(1, keepdim=True) * log_p.exp()).scatter_add_(1, head.indices, c)


def _uncentred(rule: str, log_p: Tensor, log_q: Tensor, tokens: Tensor) -> Tensor:
    """f(r_y) (e_y - p)."""
    column = tokens.unsqueeze(1)
    weight = RULES[rule][1]((log_p - log_q).gather(1, column).exp())
    return (-weight * log_p.exp()).scatter_add_(1, column, weight)


def dense_sampler(batch: Batch) -> Tensor:
    """float64[A, V], the sampler's log-probabilities by token id, of heads that hold the whole vocabulary."""
    rows, _ = action_rows(batch)
    ids = torch.from_numpy(batch.head_ids[rows]).long()
    return torch.empty(ids.shape, dtype=torch.float64).scatter_(1, ids, torch.from_numpy(batch.head_logprobs[rows]).double())


def with_head(batch: Batch, k: int) -> Batch:
    """The batch as a rollout with ``rollout.head_size=k`` would have given it."""
    cut = (np.ascontiguousarray(getattr(batch, name)[:, :k]) for name in ("head_ids", "head_logprobs"))
    return batch.with_columns(**dict(zip(("head_ids", "head_logprobs"), cut, strict=True)))


class ParameterGradients(NamedTuple):
    """What `parameter_gradients` found."""

    vectors: dict[tuple[str, int | str], Tensor]
    """(rule, k or ``exact``) -> the gradient of all parameters as one vector."""
    seconds: dict[int, list[float]]
    """k -> CPU seconds of the loss and its gradient in the hidden states, for every rule."""


def parameter_gradients(session: Session, batch: Batch, sizes: list[int]) -> ParameterGradients:
    """The gradient of a session's parameters for a whole batch with all advantages 1.

    All loss gradients go back through one forward pass. What ``exact`` sends back is `exact`; the others are what `PolicyLoss`
    sends back.

    Args:
        session: of a backbone in this process alone.
        batch: heads over the whole vocabulary.
        sizes: heads to cut; 0 for the loss that is not centred.
    """
    rows, producers = action_rows(batch)
    parameters = [t.parameter for t in session.trainables]
    log_q, tokens = dense_sampler(batch), torch.from_numpy(batch.tokens[rows]).long()
    found: dict[tuple[str, int | str], Tensor] = {}
    seconds: dict[int, list[float]] = {k: [] for k in sizes}
    assert session.adapter is not None
    with session.adapter.active():
        hidden, head = session.backbone.run(batch, lambda hidden, head: (hidden, head))
        log_p = trainer_logprobs(hidden[producers], head)

        def through(d_hidden: Tensor) -> Tensor:
            parts = torch.autograd.grad(hidden, parameters, d_hidden, retain_graph=True)
            return torch.cat([part.flatten().double() for part in parts])

        for rule in RULES:
            d_hidden = torch.zeros_like(hidden)
            d_hidden[producers] = exact(rule, log_p, log_q, tokens).float() @ head.weight.detach().float()
            found[rule, "exact"] = through(d_hidden)
            for k in sizes:
                loss = PolicyLoss(algorithm(rule, centred=k > 0))
                cut = with_head(batch, k).with_columns(advantages=np.ones(batch.num_tokens, np.float32))
                leaf = hidden.detach().requires_grad_()
                start = time.process_time()
                total = loss(LossInputs(leaf, cut, head)).loss
                assert total is not None
                (d_leaf,) = torch.autograd.grad(total, leaf)
                seconds[k].append(time.process_time() - start)
                found[rule, k] = through(d_leaf)
    return ParameterGradients(found, seconds)


@torch.no_grad()
def trainer_logprobs(hidden: Tensor, head: LMHead) -> Tensor:
    """float64[A, V] at temperature 1."""
    return torch.log_softmax((hidden.float() @ head.weight.float().T).double(), 1)


def relative_error(found: Tensor, wanted: Tensor, unit: Tensor | None = None) -> float:
    """norm(found - wanted) over norm(wanted), of all entries together; with ``unit``, over norm(unit - wanted)."""
    below = (wanted if unit is None else unit - wanted).norm()
    return float((found - wanted).norm() / below) if below > 0 else float("nan")
