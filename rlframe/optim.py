"""The optimiser of one session: schedule, trainable tensors with their gradient accumulators, clip, AdamW.

Everything works on this rank's local, plain float32 tensors: AdamW is elementwise, so a shard of a parameter is stepped like
a whole one. What the tensors belong to (adapter, value head, full weights) is not known here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from torch.optim.adamw import adamw

from rlframe.config import OptimConfig
from rlframe.ranks import Ranks

LANES = 16
"""Float32 numbers in the widest vector register of a CPU."""
NORM_RUN = 1024
"""Elements whose squares are added in float32; all of a parameter would lose three digits that way."""


def learning_rate(config: OptimConfig, step: int) -> float:
    """Learning rate of optimiser step ``step`` (counted from 0).

    Warm-up is linear and ends at step ``warmup_steps - 1`` with the full rate, so the first step already moves; ``linear`` and
    ``cosine`` then fall to ``min_lr_ratio * lr`` at ``total_steps`` and stay there.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max((config.total_steps or 0) - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / span, 1.0)
    left = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Trainable:
    """One trainable parameter: the module's tensor, its float32 master, accumulated gradient and AdamW moments.

    When the module computes in a lower precision the master is a separate tensor, and each micro-batch's gradient is added up
    in float32; otherwise the module's parameter is its own master.
    """

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name = name
        self.parameter = parameter
        self.sharded = isinstance(parameter, DTensor)
        self.gradient: Tensor | None = None
        self.exp_avg: Tensor | None = None
        self.exp_avg_sq: Tensor | None = None
        self.step: Tensor | None = None
        self._pending: Tensor | None = None
        self._master = None if parameter.dtype == torch.float32 else parameter.detach().float()
        parameter.requires_grad_(True)
        if self._master is not None:
            self._hook = parameter.register_post_accumulate_grad_hook(self._add_pending)

    def _add_pending(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        self._pending = gradient if self._pending is None else self._pending.add_(gradient)
        parameter.grad = None

    @property
    def master(self) -> Tensor:
        """float32, this rank's part. Read it afresh: FSDP may move a shard's memory before its first forward."""
        return local(self.parameter.detach()) if self._master is None else self._master

    def publish(self) -> None:
        """Copy the master into the module."""
        if self._master is not None:
            with torch.no_grad():
                self.parameter.copy_(self._master)

    def keep(self) -> None:
        """Add the gradient of the call that just succeeded to the accumulator."""
        if self._pending is None and self.parameter.grad is not None:
            self._pending = local(self.parameter.grad)
        if self._pending is not None:
            self.gradient = self._pending if self.gradient is None else self.gradient.add_(self._pending)
        self.discard()

    def discard(self) -> None:
        """Drop the gradient of a call that failed."""
        self._pending = None
        self.parameter.grad = None

    def forget(self) -> None:
        """Start again without gradient and moments."""
        self.discard()
        self.gradient = self.exp_avg = self.exp_avg_sq = self.step = None

    def release(self) -> None:
        """Leave the parameter as it was found: not trainable, no hook."""
        self.forget()
        self.parameter.requires_grad_(False)
        if self._master is not None:
            self._hook.remove()

    def moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """AdamW's exp_avg, exp_avg_sq and step count, made on first use."""
        if self.exp_avg is None or self.exp_avg_sq is None or self.step is None:
            self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)
            self.step = torch.zeros((), device=self.master.device)
        return self.exp_avg, self.exp_avg_sq, self.step


def reduce_gradients(trainables: list[Trainable], ranks: Ranks) -> list[Trainable]:
    """Sum the accumulated gradients over the ranks, in place.

    Sharded gradients were summed when FSDP scattered them; replicated ones (adapters, value heads) are summed here, in one
    flat all-reduce. A parameter that some rank's data did not touch counts as zero there.

    Returns:
        Those that some rank has a gradient for.
    """
    touched = ranks.maximum([int(t.gradient is not None) for t in trainables])
    used = [t for t, flag in zip(trainables, touched, strict=True) if flag]
    replicated = [t for t in used if not t.sharded]
    for t in used:
        if t.gradient is None:
            t.gradient = torch.zeros_like(t.master)
    if ranks.size > 1 and replicated:
        flat = ranks.sum_(torch.cat([t.gradient.flatten() for t in replicated if t.gradient is not None]))
        for t, part in zip(replicated, flat.split([t.master.numel() for t in replicated]), strict=True):
            t.gradient = part.view_as(t.master)
    return used


def gradient_norm(trainables: list[Trainable], ranks: Ranks) -> float:
    """Global L2 norm of the gradients, added up in float64 so that it does not depend on how parameters are sharded."""
    device = trainables[0].master.device
    squares = torch.zeros(2, dtype=torch.float64, device=device)
    for t in trainables:
        assert t.gradient is not None
        if t.gradient.numel():
            squares[int(t.sharded)] += _square_sum(t.gradient.flatten())
    if ranks.size > 1 and any(t.sharded for t in trainables):
        ranks.sum_(squares[1:])
    return float(squares.sum().sqrt())


def _square_sum(flat: Tensor) -> Tensor:
    """Sum of squares [] in float64 of float32[n]: short runs in float32, which loses no more than their rounding."""
    whole = len(flat) // NORM_RUN * NORM_RUN
    runs = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_RUN), dim=1)
    return runs.double().square().sum() + torch.linalg.vector_norm(flat[whole:], dtype=torch.float64).square()


class _Pieces:
    """Flat tensors for the fused AdamW kernel, cut so that it steps every element alike, however parameters are sharded.

    On a CPU it takes `LANES` elements at a time and the rest of a tensor one by one, with another rounding: a rest is padded.
    """

    def __init__(self) -> None:
        self.columns: tuple[list[Tensor], ...] = ([], [], [], [])
        """Masters, gradients, exp_avg, exp_avg_sq."""
        self.steps: list[Tensor] = []
        self._rests: list[tuple[Tensor, Tensor]] = []

    def add(self, t: Trainable) -> None:
        """One parameter with its gradient."""
        assert t.gradient is not None
        *moments, step = t.moments()
        flats = [x.view(-1) for x in (t.master, t.gradient, *moments)]
        rest = len(flats[0]) % LANES if flats[0].device.type == "cpu" else 0
        if rest:
            padded = [pad(x[-rest:], (0, LANES - rest)) for x in flats]
            self._rests += [(x[-rest:], p) for x, p in zip(flats, padded, strict=True)]
            self._append(padded, step.clone())
        self._append([x[: len(x) - rest] for x in flats], step)

    def _append(self, flats: list[Tensor], step: Tensor) -> None:
        for column, flat in zip(self.columns, flats, strict=True):
            column.append(flat)
        self.steps.append(step)

    def finish(self) -> None:
        """Bring the padded elements home."""
        for place, padded in self._rests:
            place.copy_(padded[: len(place)])


@torch.no_grad()
def adamw_step(trainables: list[Trainable], config: OptimConfig, *, lr: float) -> None:
    """One AdamW update (decoupled weight decay) of the masters by their gradients; consumes the gradients."""
    pieces = _Pieces()
    for t in trainables:
        if t.master.numel():
            pieces.add(t)
    if pieces.steps:
        masters, gradients, exp_avgs, exp_avg_sqs = pieces.columns
        adamw(
            masters,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            [],
            pieces.steps,
            fused=True,
            amsgrad=False,
            beta1=config.betas[0],
            beta2=config.betas[1],
            lr=lr,
            weight_decay=config.weight_decay,
            eps=config.eps,
            maximize=False,
        )
        pieces.finish()
    for t in trainables:
        t.publish()
