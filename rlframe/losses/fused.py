"""One pass over (hidden, lm_head) for log-probabilities, entropy, loss and gradients; full logits are never held.

Every policy loss here is a function of the log-probabilities of the sampled token and of the head's tokens, so its gradient
with respect to the logits is a scaled softmax plus a scatter: with slopes a = dL/dlog p_y and b_v = dL/dlog p_v,

    dL/dz = a e_y + sum_v b_v e_v - (a + sum_v b_v) softmax(z).

A chunk of logits therefore yields its own gradient while it is still in the cache, in the forward pass, without a second
matrix product to recompute it. What the slopes are is the business of an `Objective` (`rlframe.losses.policy`).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlframe.losses.base import LMHead

CHUNK_BYTES = 32 * 2**20
"""Logits of one chunk; large enough for efficient matrix products, small beside the activations of a model."""


class Slopes(NamedTuple):
    """An objective's answer for the C tokens of a chunk."""

    sampled: Tensor
    """[C], dL / dlog p of the sampled token."""
    head: Tensor | None
    """[C, k], dL / dlog p of the head's tokens."""
    stats: Tensor
    """[S, C], whatever the objective wants back for every token; row 0 is the loss."""


class Objective(Protocol):
    """A loss over A action tokens."""

    tokens: Tensor
    """int64[A], the sampled tokens."""
    head_ids: Tensor | None
    """int64[A, k], tokens whose log-probabilities the objective also needs; padded entries hold any valid id."""
    has_factors: bool
    """Whether `factors` applies: a factor of a token that depends on the log-probabilities of its whole trajectory."""

    def slopes(self, rows: slice, logprobs: Tensor, head_logprobs: Tensor | None) -> Slopes:
        """Slopes of the tokens ``rows`` given their log-probabilities [C] and [C, k]."""
        ...

    def factors(self, logprobs: Tensor) -> Tensor:
        """[A], detached factor on the loss and gradient of every token given all log-probabilities [A]."""
        ...


class FusedOutputs(NamedTuple):
    """Result of `fused_loss`; only ``loss`` carries a gradient."""

    loss: Tensor
    """Scalar sum over the tokens."""
    logprobs: Tensor
    """[A], nats."""
    entropy: Tensor
    """[A], nats."""
    stats: Tensor
    """[S, A], as the objective returned them, row 0 multiplied by the factors."""


def fused_loss(
    hidden: Tensor, head: LMHead, objective: Objective, temperature: float = 1.0, chunk_rows: int | None = None
) -> FusedOutputs:
    """Evaluate ``objective`` on softmax(logits / temperature) and prepare its gradients.

    Args:
        hidden: [A, H], the states that produced the tokens. Their gradient, and that of ``head.weight`` and ``head.bias``, is
            computed here if they require one, and scaled in the backward pass.
        head: the projection; with ``head.group`` every rank of the group passes the same ``hidden`` and its own rows of the
            vocabulary, and gets the same outputs and the full gradient of ``hidden``.
        objective: what to compute.
        temperature: positive.
        chunk_rows: tokens per chunk; by default as many as `CHUNK_BYTES` of logits allow.

    Returns:
        Outputs in fp32 (fp64 if ``hidden`` is fp64).
    """
    weight, bias = head.weight, head.bias
    wanted = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias))
    return FusedOutputs(*_FusedLoss.apply(hidden, weight, bias, head, objective, temperature, chunk_rows, wanted))


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: LMHead, objective: Objective,
                temperature: float, chunk_rows: int | None, wanted: tuple[bool, bool, bool]) -> tuple[Tensor, ...]:  # fmt: skip
        sweep = _Sweep(hidden, weight, bias, head, temperature, chunk_rows, objective, wanted)
        factors = None
        if objective.has_factors:
            # The gradient of the projection sums over tokens, so its factors must be known first; a row of the gradient of
            # ``hidden`` can be scaled afterwards.
            if wanted[1] or wanted[2]:
                factors = objective.factors(sweep.logprobs_only())
                sweep.run(factors)
            else:
                sweep.run(None)
                factors = objective.factors(sweep.logprobs)
                sweep.scale(factors)
        else:
            sweep.run(None)
        outputs = (sweep.stats[0].sum(), sweep.logprobs, sweep.entropy, sweep.stats)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.save_for_backward(*sweep.gradients())
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return *(None if g is None else grad.to(g.dtype) * g for g in ctx.saved_tensors), *[None] * 5


class _Sweep:
    """The chunks of one fused pass and what they accumulate."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: LMHead, temperature: float,
                 chunk_rows: int | None, objective: Objective, wanted: tuple[bool, bool, bool]) -> None:  # fmt: skip
        self.hidden, self.head, self.objective, self.temperature = hidden, head, objective, temperature
        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self.weight = weight.to(self.dtype)
        self.bias = None if bias is None else bias.to(self.dtype)
        count, rows = len(hidden), chunk_rows or max(1, CHUNK_BYTES // (self.weight.shape[0] * self.weight.element_size()))
        self.chunks = [slice(a, min(a + rows, count)) for a in range(0, count, rows)]
        new = self.weight.new_zeros
        self.logprobs, self.entropy, self.stats = new(count), new(count), new(1, count)
        self.d_hidden = new(hidden.shape) if wanted[0] else None
        self.d_weight = new(weight.shape) if wanted[1] else None
        self.d_bias = new(weight.shape[0]) if wanted[2] else None
        self.weight_dtype = weight.dtype

    def logprobs_only(self) -> Tensor:
        """[A], a pass without gradients."""
        for rows in self.chunks:
            self.logprobs[rows] = _softmax(self._logits(self._input(rows))[0], self.head, self._ids(rows)).logprobs
        return self.logprobs

    def run(self, factors: Tensor | None) -> None:
        """The pass: statistics of every token, and gradients where wanted, times ``factors`` [A] if given."""
        for rows in self.chunks:
            h = self._input(rows)
            z, tanh = self._logits(h)
            soft = _softmax(z, self.head, self._ids(rows))
            slopes = self.objective.slopes(rows, soft.logprobs, soft.head_logprobs)
            if len(self.stats) != len(slopes.stats):
                self.stats = self.stats.new_zeros(len(slopes.stats), self.stats.shape[1])
            self.logprobs[rows], self.entropy[rows], self.stats[:, rows] = soft.logprobs, soft.entropy, slopes.stats
            if factors is not None:
                self.stats[0, rows] *= factors[rows]
            if self.d_hidden is not None or self.d_weight is not None or self.d_bias is not None:
                self._accumulate(rows, h, soft, slopes, None if factors is None else factors[rows], tanh)
        if self.head.group is not None and self.d_hidden is not None:
            dist.all_reduce(self.d_hidden, group=self.head.group)

    def scale(self, factors: Tensor) -> None:
        """Apply the factors of every token [A] after the pass."""
        self.stats[0] *= factors
        if self.d_hidden is not None:
            self.d_hidden *= factors.unsqueeze(1)

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Gradients of hidden, weight and bias in their own dtypes."""
        found = ((self.d_hidden, self.hidden.dtype), (self.d_weight, self.weight_dtype), (self.d_bias, self.weight_dtype))
        return tuple(None if g is None else g.to(dtype) for g, dtype in found)

    def _input(self, rows: slice) -> Tensor:
        """[C, H], hidden states with every factor that precedes the soft cap or the softmax folded in."""
        before = self.head.scale if self.head.softcap else self.head.scale / self.temperature
        h = self.hidden[rows].to(self.dtype)
        return h if before == 1 else h * before

    def _logits(self, h: Tensor) -> tuple[Tensor, Tensor | None]:
        """[C, V] logits over the temperature, and tanh of the soft cap."""
        z = h @ self.weight.T
        if self.bias is not None:
            z += self.bias * (self.head.scale if self.head.softcap else self.head.scale / self.temperature)
        if not self.head.softcap:
            return z, None
        tanh = z.div_(self.head.softcap).tanh_()
        return tanh * (self.head.softcap / self.temperature), tanh

    def _ids(self, rows: slice) -> Tensor:
        """[C, 1 + k], the sampled token followed by the head."""
        tokens = self.objective.tokens[rows].unsqueeze(1)
        heads = self.objective.head_ids
        return tokens if heads is None else torch.cat([tokens, heads[rows].to(tokens.dtype)], 1)

    def _accumulate(self, rows: slice, h: Tensor, soft: _Softmax, slopes: Slopes, factors: Tensor | None,
                    tanh: Tensor | None) -> None:  # fmt: skip
        each = slopes.sampled.unsqueeze(1)
        if slopes.head is not None:
            each = torch.cat([each, slopes.head], 1)
        if factors is not None:
            each = each * factors.unsqueeze(1)
        dz = soft.exp.mul_((-each.sum(1) / soft.total).unsqueeze(1))
        dz.scatter_add_(1, soft.local_ids, each if soft.here is None else torch.where(soft.here, each, 0.0))
        before = self.head.scale / self.temperature
        if tanh is not None:
            # d(cap tanh(u / cap) / T) / du = (1 - tanh^2) / T, and u = scale (h W^T + b) with the scale already in h.
            dz.mul_(tanh.square_().neg_().add_(1)).div_(self.temperature)
            before = self.head.scale
        if self.d_hidden is not None:
            self.d_hidden[rows] = (dz @ self.weight).mul_(before)
        if self.d_weight is not None:
            self.d_weight.addmm_(dz.T, h)
        if self.d_bias is not None:
            self.d_bias += dz.sum(0) * before


class _Softmax(NamedTuple):
    logprobs: Tensor
    head_logprobs: Tensor | None
    entropy: Tensor
    exp: Tensor
    """[C, V], exp(z - max), unnormalised."""
    total: Tensor
    """[C], its sum over the (whole) vocabulary."""
    local_ids: Tensor
    """[C, 1 + k], columns of ``exp`` that hold the sampled token and the head."""
    here: Tensor | None
    """bool[C, 1 + k], whether those columns are on this rank; None when the vocabulary is whole."""


def _softmax(z: Tensor, head: LMHead, ids: Tensor) -> _Softmax:
    """Everything about a chunk of logits z [C, V] (overwritten) that needs the softmax, for the columns ``ids`` [C, 1 + k]."""
    here = None
    if head.group is not None:
        ids = ids - head.vocab_start
        here = (ids >= 0) & (ids < z.shape[1])
        ids = torch.where(here, ids, 0)
    top = z.amax(1, keepdim=True)
    if head.group is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=head.group)
    z.sub_(top)
    picked = z.gather(1, ids)
    exp = z.exp()
    sums = torch.stack([exp.sum(1), torch.linalg.vecdot(exp, z)], 1)
    if head.group is not None:
        packed = torch.cat([torch.where(here, picked, 0.0), sums], 1)  # type: ignore[arg-type]
        dist.all_reduce(packed, group=head.group)
        picked, sums = packed[:, :-2], packed[:, -2:]
    total, weighted = sums.unbind(1)
    log_total = total.log()
    logprobs = picked - log_total.unsqueeze(1)
    return _Softmax(
        logprobs[:, 0], logprobs[:, 1:] if ids.shape[1] > 1 else None, log_total - weighted / total, exp, total, ids, here
    )
