"""A custom policy loss, ``algorithm.policy_loss=module:Class``: validated on six tokens and adapted to the fused pass.

The class is called as `rlframe.losses.base.TokenLoss` is, or with ``level = "sequence"`` as `SequenceLoss`. It may return the
loss of every token alone: the slopes are then autograd's, so what is detached is a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlframe.config import ConfigError
from rlframe.losses.base import SequenceLoss, TokenLoss, TokenTerms
from rlframe.losses.corrections import WeightRule
from rlframe.losses.sequences import Sequences


def checked_loss(loss: Any, path: str) -> TokenLoss | SequenceLoss:
    """``loss`` adapted to the fused pass, after it has passed a trial on six tokens.

    Raises:
        ConfigError: it fails, its shapes or dtypes are wrong, a number is not finite, a slope is not the derivative of the
            loss, tokens or trajectories change each other's numbers, or its scores are not centred with what it says.
    """
    level, centering = getattr(loss, "level", "token"), getattr(loss, "centering", None)
    if level not in ("token", "sequence"):
        raise ConfigError(f"algorithm.policy_loss={path} has level={level!r}; it must be 'token' or 'sequence'.")
    fault = _fault(loss, level, centering)
    if fault is not None:
        raise ConfigError(f"algorithm.policy_loss={path} {fault}.")
    adapted: Any = _CustomLoss(loss, level, centering)
    return adapted


@dataclass(frozen=True)
class _CustomLoss:
    """A loss whose slopes are its own, or autograd's where it gives none."""

    loss: Callable[..., Tensor | TokenTerms]
    level: str
    centering: WeightRule | None

    def __call__(self, logprobs: Tensor, *rest: Any) -> TokenTerms:
        with torch.enable_grad():
            variable = logprobs.detach().requires_grad_()
            found = self.loss(variable, *rest)
            if isinstance(found, Tensor):
                return TokenTerms(found.detach(), _derivative(found, variable))
        weight, clipped = (part if part is None else part.detach() for part in (found.weight, found.clipped))
        return TokenTerms(found.loss.detach(), found.slope.detach(), weight, clipped)


LOG_Q = (-1.2, -0.7, -2.0, -0.4, -1.6, -0.9)
LOG_RATIO = (0.03, -0.21, 0.4, -0.05, 0.17, -0.33)
ADVANTAGES = (1.0, -0.5, 0.8, -1.3, 0.6, -0.9)
SEGMENTS = (0, 0, 0, 1, 1, 1)


def _fault(loss: Any, level: str, centering: WeightRule | None) -> str | None:
    """What is wrong with a loss, tried on six tokens of two trajectories in float64; the end of a sentence."""
    log_q, log_ratio, advantages = (torch.tensor(row, dtype=torch.float64) for row in (LOG_Q, LOG_RATIO, ADVANTAGES))
    segments = torch.tensor(SEGMENTS)

    def call(logprobs: Tensor, rows: slice = slice(None)) -> Any:
        own = segments[rows] - segments[rows].min()
        more = (Sequences(own, int(own.max()) + 1),) if level == "sequence" else ()
        return loss(logprobs, log_q[rows], advantages[rows], *more)

    variable = (log_q + log_ratio).requires_grad_()
    try:
        with torch.enable_grad():
            found = call(variable)
            if fault := _malformed(found, variable):
                return fault
            terms = TokenTerms(found, _derivative(found, variable)) if isinstance(found, Tensor) else found
            if fault := _wrong_slope(terms, variable, lambda logprobs: call(logprobs).loss):
                return fault
            for rows in (slice(0, 3), slice(3, 6)):
                part = call(variable.detach()[rows].requires_grad_(), rows)
                losses = part if isinstance(part, Tensor) else part.loss
                if not torch.allclose(losses, terms.loss[rows], rtol=1e-9):
                    return (
                        f"gives a {'trajectory' if level == 'sequence' else 'token'} "
                        "another loss with other tokens present than alone, "
                        "so results would depend on how a batch is cut; leave out what mixes them, such as means and extremes"
                    )
    except Exception as error:  # whatever the user's code does
        return f"failed on a trial with six tokens: {_message_of(error)}"
    if centering is None:
        return None
    if level == "sequence":
        return "has level='sequence' and a centering, which is defined for the weight of one token's ratio; leave it out"
    if not torch.allclose(terms.slope, -advantages * centering.weight(log_ratio), rtol=1e-6):
        return "has a centering f, but its slope is not -A f(r); correct one of them, or leave out centering"
    return None


def _malformed(found: Any, variable: Tensor) -> str | None:
    """Shapes, dtypes and numbers."""
    if isinstance(found, Tensor):
        if found.shape == variable.shape and not found.requires_grad:
            return "returns a loss that does not depend on the trainer's log-probabilities; something detaches them"
        found = TokenTerms(found, found)
    if not isinstance(found, TokenTerms):
        return f"returns a {type(found).__name__}; it must return the loss of every token, a tensor [A], or TokenTerms"
    for name, part in found._asdict().items():
        if part is None and name in ("weight", "clipped"):
            continue
        if not isinstance(part, Tensor) or part.shape != variable.shape:
            shape = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
            return f"returns a {name} of shape {shape} for 6 tokens; it must be (6,), with no sum or mean over them"
        if name != "clipped" and part.dtype != variable.dtype:
            return f"returns a {name} in {part.dtype} for log-probabilities in {variable.dtype}; keep their dtype"
        if not part.isfinite().all():
            return f"returns a {name} that is not finite for ratios near 1"
    return None


def _wrong_slope(terms: TokenTerms, variable: Tensor, losses: Callable[[Tensor], Tensor]) -> str | None:
    """The slope against autograd where the loss has a graph, else against differences of the loss."""
    if terms.loss.requires_grad:
        expected, tolerance = _derivative(terms.loss, variable), 1e-6
    else:
        h, tolerance = 1e-5, 1e-4
        steps = h * torch.eye(len(variable), dtype=variable.dtype)
        at = variable.detach()
        expected = torch.stack([(losses(at + step) - losses(at - step)).sum() / (2 * h) for step in steps])
    if torch.allclose(terms.slope.detach(), expected, rtol=tolerance, atol=tolerance):
        return None
    worst = int((terms.slope - expected).abs().argmax())
    return (
        f"returns slope {float(terms.slope[worst]):.6g} where the derivative of its loss is {float(expected[worst]):.6g}; "
        "correct it, detach() what is a constant, or return the loss alone and leave the slope to autograd"
    )


def _derivative(losses: Tensor, variable: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(losses.sum(), variable, retain_graph=True)
    return slope


def _message_of(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}".rstrip(".")
