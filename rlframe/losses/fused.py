"""One pass over (hidden, lm_head) for log-probabilities, entropy, loss and gradients; full logits are never held.

Every policy loss here is a function of the log-probabilities of the sampled token and of the head's tokens, so its gradient
with respect to the logits is a scaled softmax plus a scatter: with slopes a = dL/dlog p_y and b_v = dL/dlog p_v,

    dL/dz = a e_y + sum_v b_v e_v - (a + sum_v b_v) softmax(z).

A chunk of logits therefore yields its own gradient in the forward pass, while it is still there: two matrix products per
chunk, as many as the unfused loss takes, and none to recompute logits. An `Objective` defines the slopes. A loss of whole
trajectories knows them only `afterwards`: its slopes in the pass are 1, and the factors that it then gives scale each row of
the gradient of ``hidden`` (if the head trains as well, they come from a first pass for log-probabilities).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlframe.losses.base import LMHead
from rlframe.losses.projection import Projection
from rlframe.losses.softmax import Softmax, softmax
from rlframe.precision import full_precision


class Slopes(NamedTuple):
    """What an objective returns for the C tokens of a chunk."""

    sampled: Tensor
    """[C], dL / dlog p of the sampled token."""
    head: Tensor | None
    """[C, k], dL / dlog p of the head's tokens; None where they play no part."""
    loss: Tensor
    """[C]"""
    stats: dict[str, Tensor]
    """Further per-token statistics of the objective, [C] or [C, m]; the same names for every chunk."""


class Afterwards(NamedTuple):
    """What an objective returns given the log-probabilities of all A tokens, which form whole trajectories."""

    factors: Tensor
    """[A], constant factor on the slopes of every token."""
    loss: Tensor | None
    """[A], in the place of what the chunks gave; None: that, times the factors."""
    stats: dict[str, Tensor]
    """[A] by name, beside those of the chunks."""


class Objective(Protocol):
    """A loss over A action tokens."""

    tokens: Tensor
    """int64[A], the sampled tokens."""
    head_ids: Tensor | None
    """int[A, k], tokens whose log-probabilities the objective needs too; padded entries hold any valid id."""
    whole: bool
    """Whether `afterwards` applies: something of a token depends on the log-probabilities of its whole trajectory."""

    def slopes(self, rows: slice, logprobs: Tensor, head_logprobs: Tensor) -> Slopes:
        """Slopes of the tokens ``rows`` given their log-probabilities [C], and those of the head [C, k] (k may be 0)."""
        ...

    def afterwards(self, logprobs: Tensor) -> Afterwards:
        """What follows from all log-probabilities [A]."""
        ...


class FusedOutputs(NamedTuple):
    """Result of `fused_loss`; only ``loss`` carries a gradient."""

    loss: Tensor
    """Scalar sum over the tokens."""
    logprobs: Tensor
    """[A], nats."""
    entropy: Tensor
    """[A], nats."""
    losses: Tensor
    """[A], the loss of each token."""
    stats: dict[str, Tensor]
    """[A] or [A, m] by name, as the objective returned them."""


@full_precision()
def fused_loss(hidden: Tensor, head: LMHead, objective: Objective, temperature: float = 1.0) -> FusedOutputs:
    """Evaluate ``objective`` on softmax(logits / temperature) and prepare its gradients.

    Args:
        hidden: [A, H], the states that produced the tokens. Their gradient, and that of ``head.weight`` and ``head.bias``, is
            computed here if they require one, and scaled in the backward pass.
        head: the projection; with ``head.group`` every rank of the group passes the same ``hidden`` and its own rows of the
            vocabulary, and gets the same outputs and the full gradient of ``hidden``.
        objective: what to compute.
        temperature: positive.

    Returns:
        Outputs in fp32 (fp64 if ``hidden`` is fp64).

    Raises:
        ValueError: hidden and weight do not fit together, not one state per token, ids outside of the vocabulary, or a
            temperature that is not positive and finite.
    """
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; logits are divided by it, so it must be above 0 and finite.")
    if hidden.ndim != 2 or head.weight.ndim != 2 or hidden.shape[1] != head.weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and lm_head weight {tuple(head.weight.shape)} must be [A, H] and [V, H]."
        )
    if objective.tokens.shape != hidden.shape[:1]:
        raise ValueError(f"There are {len(hidden)} hidden states for tokens of shape {tuple(objective.tokens.shape)}.")
    _check_ids(objective, head.vocabulary())
    graph = torch.is_grad_enabled()
    wanted = tuple(graph and t is not None and t.requires_grad for t in (hidden, head.weight, head.bias))
    return FusedOutputs(*_FusedLoss.apply(hidden, head.weight, head.bias, head, objective, temperature, wanted))


def _check_ids(objective: Objective, vocabulary: int) -> None:
    for name, ids in (("tokens", objective.tokens), ("head_ids", objective.head_ids)):
        if ids is not None and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            where = ((ids < 0) | (ids >= vocabulary)).nonzero()[0].tolist()
            raise ValueError(
                f"{name} has {int(ids[tuple(where)])} in row {where[0]}, but the vocabulary has {vocabulary} entries."
            )


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: LMHead,
        objective: Objective,
        temperature: float,
        wanted: tuple[bool, bool, bool],
    ) -> tuple[Any, ...]:
        sweep = _Sweep(Projection(head, hidden, temperature, wanted), head, objective)
        if objective.whole and sweep.projection.trains_head:
            # The gradient of the projection sums over tokens, so their factors must be known before it is formed.
            after = objective.afterwards(sweep.logprobs_only())
            sweep.run(after.factors)
            sweep.finish(after)
        else:
            sweep.run(None)
            if objective.whole:
                after = objective.afterwards(sweep.logprobs)
                sweep.scale(after.factors)
                sweep.finish(after)
        if head.group is not None and sweep.projection.d_hidden is not None:
            dist.all_reduce(sweep.projection.d_hidden, group=head.group)
        tensors = (sweep.logprobs, sweep.entropy, sweep.losses)
        ctx.mark_non_differentiable(*tensors)
        ctx.save_for_backward(*sweep.projection.gradients())
        ctx.dtypes = [None if t is None else t.dtype for t in (hidden, weight, bias)]
        return sweep.losses.sum(), *tensors, sweep.stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        # A raw sum is usually differentiated as it is; the gradient of a whole lm_head is worth not copying.
        scale = float(grad)
        scaled = (g if g is None or scale == 1 else g * scale for g in ctx.saved_tensors)
        narrow = (g if g is None else g.to(dtype) for g, dtype in zip(scaled, ctx.dtypes, strict=True))
        return *narrow, None, None, None, None


class _Sweep:
    """The chunks of one fused pass and what they add up to."""

    def __init__(self, projection: Projection, head: LMHead, objective: Objective) -> None:
        self.projection, self.head, self.objective = projection, head, objective
        self.count = len(projection.hidden)
        self.logprobs = projection.hidden.new_zeros(self.count, dtype=projection.dtype)
        self.entropy = torch.zeros_like(self.logprobs)
        self.losses = torch.zeros_like(self.logprobs)
        self.stats: dict[str, Tensor] = {}
        self._exp = self.logprobs.new_empty(projection.rows, len(projection.weight))

    def run(self, factors: Tensor | None) -> None:
        """Statistics of every token, and gradients where wanted, times ``factors`` [A] if they are known already."""
        for rows in self._chunks():
            soft = self._softmax(rows)
            slopes = self.objective.slopes(rows, soft.logprobs[:, 0], soft.logprobs[:, 1:])
            self.logprobs[rows], self.entropy[rows], self.losses[rows] = soft.logprobs[:, 0], soft.entropy, slopes.loss
            for name, values in slopes.stats.items():
                if name not in self.stats:
                    self.stats[name] = values.new_zeros(self.count, *values.shape[1:])
                self.stats[name][rows] = values
            if self.projection.trains:
                each = slopes.sampled.unsqueeze(1)
                if slopes.head is not None:
                    each = torch.cat([each, slopes.head], 1)
                else:
                    soft = soft._replace(columns=soft.columns[:, :1], here=None if soft.here is None else soft.here[:, :1])
                if factors is not None:
                    each = _scaled(each, factors[rows].unsqueeze(1))
                self.projection.accumulate(rows, soft.gradient(each))

    def logprobs_only(self) -> Tensor:
        """[A], log-probabilities of the sampled tokens from a pass of their own."""
        for rows in self._chunks():
            self.logprobs[rows] = self._softmax(rows).logprobs[:, 0]
        return self.logprobs

    def scale(self, factors: Tensor) -> None:
        """Apply the factors of every token [A] after the pass: each has its own row of the gradient of ``hidden``."""
        if self.projection.d_hidden is not None:
            self.projection.d_hidden = _scaled(self.projection.d_hidden, factors.unsqueeze(1))

    def finish(self, after: Afterwards) -> None:
        """The loss and the statistics of every token after the pass."""
        self.losses = _scaled(self.losses, after.factors) if after.loss is None else after.loss
        self.stats |= after.stats

    def _chunks(self) -> list[slice]:
        """At least one, so that a rank without tokens takes part in collectives and returns arrays of the same width."""
        size = self.projection.rows
        return [slice(first, min(first + size, self.count)) for first in range(0, max(self.count, 1), size)]

    def _softmax(self, rows: slice) -> Softmax:
        ids = self.objective.tokens[rows].unsqueeze(1)
        if self.objective.head_ids is not None:
            ids = torch.cat([ids, self.objective.head_ids[rows].to(ids.dtype)], 1)
        z = self.projection.logits(rows)
        return softmax(z, ids, self.head, self._exp[: len(z)])


def _scaled(x: Tensor, factors: Tensor) -> Tensor:
    """x times factors, where a factor of 0 gives 0 whatever x is."""
    return torch.where(factors == 0, 0.0, x * factors)
