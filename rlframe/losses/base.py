"""What every loss takes and gives: one `LossInputs` in, one `LossOutputs` out. No algorithm lives here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlframe.losses.corrections import WeightRule
from rlframe.losses.sequences import Sequences
from rlframe.metrics import Metrics
from rlframe.types import Batch


@dataclass
class LMHead:
    """The output projection as the losses need it; logits = softcap(hidden @ weight.T + bias)."""

    weight: Tensor
    """[V, H] (or [V / shards, H] when vocabulary-parallel), any float dtype; its gradient is computed only if required."""
    bias: Tensor | None = None
    """[V]"""
    softcap: float | None = None
    """Logits are ``softcap * tanh(logits / softcap)`` when set (Gemma 2)."""
    scale: float = 1.0
    """Logits are multiplied by this before the soft cap (architectures that scale their logits)."""
    vocab_start: int = 0
    """First vocabulary row held here."""
    group: Any = None
    """torch.distributed process group over which vocabulary rows are sharded; None when whole."""

    def vocabulary(self) -> int:
        """V, entries of the whole vocabulary; every rank of ``group`` takes part."""
        end = self.vocab_start + len(self.weight)
        if self.group is None:
            return end
        ends = torch.tensor([end], device=self.weight.device)
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=self.group)
        return int(ends.item())


@dataclass
class LossInputs:
    """One micro-batch of whole trajectories on one device."""

    hidden: Tensor
    """[N, H], last hidden state *after* token n (final norm applied): row n predicts token n + 1 of its trajectory."""
    batch: Batch
    """The same N tokens."""
    lm_head: LMHead | None = None
    """Present when the session's loss is on tokens."""
    value_head: Any = None
    """Callable [*, H] -> [*] in fp32, present when the session has one."""


@dataclass
class LossOutputs:
    """Raw sums: nothing is divided here, division happens once, by the global count of action tokens."""

    loss: Tensor | None
    """Scalar sum over the action tokens of the micro-batch; None for forward-only outputs."""
    metrics: Metrics = field(default_factory=Metrics)
    """Mergeable sums."""
    per_token: dict[str, Tensor] = field(default_factory=dict)
    """Detached float32[N] arrays (``values``, ``logprobs``, ``entropy``, ...), 0 off the mask."""
    per_trajectory: dict[str, Tensor] = field(default_factory=dict)
    """Detached float32[B] arrays (``bootstrap``, ...)."""


class TokenTerms(NamedTuple):
    """What a policy loss says about A action tokens."""

    loss: Tensor
    """[A], the loss of each token; their sum is trained on."""
    slope: Tensor
    """[A], the derivative of the sum with respect to each token's log-probability."""
    weight: Tensor | None = None
    """[A], the factor on the plain score A grad log p, detached; for metrics, None: there is none."""
    clipped: Tensor | None = None
    """bool[A], where clipping, truncation or a band changed the factor; measured on the ratio before it is changed."""


class TokenLoss(Protocol):
    """A policy loss of each token on its own; `rlframe.losses.token` has those that are built in.

    One of a user's own may return only the loss [A]; autograd then finds the slope, and what is detached is a constant. One
    with ``columns``, names of columns of the batch, gets each as an argument of that name, too: a tensor [A], in which what the
    batch has once per trajectory stands on each of its tokens.
    """

    level: ClassVar[Literal["token"]]

    @property
    def centering(self) -> WeightRule | None:
        """f where L = -A sg[f(r)] log p, so that scores can be centred with it; None where a weight depends on more than r."""
        ...

    def __call__(self, logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor) -> TokenTerms:
        """Log p, log q and the advantage of the tokens of a chunk, all [A]; any other shape, too, for the built-in losses."""
        ...


class SequenceLoss(Protocol):
    """A policy loss that looks at whole trajectories; `rlframe.losses.sequence` has those that are built in.

    ``columns`` as in `TokenLoss`.
    """

    level: ClassVar[Literal["sequence"]]

    @property
    def centering(self) -> None:
        """None: centering needs a weight that depends on one token's ratio alone."""
        ...

    def __call__(self, logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, sequences: Sequences) -> TokenTerms:
        """All action tokens of some whole trajectories, [A] each; a trajectory must not change what another gets."""
        ...


class Loss(Protocol):
    """A loss is a callable; sessions know no loss by name."""

    needs: str
    """``"lm_head"`` or ``"value_head"``: which head the session must hand over."""

    def __call__(self, inputs: LossInputs) -> LossOutputs: ...
