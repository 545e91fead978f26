"""The critic's loss and its forward-only twin. Values are read at the row that produced a token: V of the state before it.

The value head itself belongs to the session; `rlframe.advantages` computes the targets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlframe.alignment import action_rows, last_rows
from rlframe.losses.base import LossInputs, LossOutputs
from rlframe.metrics import Metrics
from rlframe.validation import check_finite, check_rows


def squared_errors(values: Tensor, returns: Tensor, old: Tensor | None, clip_range: float | None) -> tuple[Tensor, Tensor]:
    """[A] errors (V - R)^2, clipped against old values if asked, and bool[A] where the clipped error is the larger one.

    Raises:
        ValueError: shapes differ, or there is nothing to clip against.
    """
    if returns.shape != values.shape:
        raise ValueError(f"values {tuple(values.shape)} and returns {tuple(returns.shape)} differ in shape.")
    errors = (values - returns).square()
    if clip_range is None:
        return errors, torch.zeros_like(errors, dtype=torch.bool)
    if old is None or old.shape != values.shape:
        raise ValueError(f"clip_range needs old values of shape {tuple(values.shape)}.")
    bounded = (old + (values - old).clamp(-clip_range, clip_range) - returns).square()
    return torch.maximum(errors, bounded), bounded > errors


class ValueLoss:
    """0.5 * vf_coef * sum over action tokens of (V - R)^2, in fp32.

    With ``clip_range`` c the value may leave the old one by at most c before its error counts: the larger of the plain and the
    clipped error is used, per token (PPO2).
    """

    needs = "value_head"

    def __init__(self, vf_coef: float = 1.0, clip_range: float | None = None) -> None:
        self.vf_coef = vf_coef
        self.clip_range = clip_range

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Loss and metrics; ``values`` of every action token.

        Raises:
            ValueError: shapes differ, or returns (with ``clip_range`` also values) are missing or not finite.
        """
        batch, hidden = inputs.batch, inputs.hidden
        used = ("returns",) if self.clip_range is None else ("returns", "values")
        check_rows(batch, len(hidden), *used)
        rows, producers = action_rows(batch)
        check_finite(batch, *used)
        values = _values(inputs, producers)
        returns = torch.from_numpy(batch.returns[rows]).to(values)  # type: ignore[index]
        old = None if self.clip_range is None else torch.from_numpy(batch.values[rows]).to(values)  # type: ignore[index]
        errors, clipped = squared_errors(values, returns, old, self.clip_range)
        each = 0.5 * self.vf_coef * errors
        per_token = torch.zeros(batch.num_tokens, device=hidden.device)
        per_token[torch.from_numpy(rows).to(hidden.device)] = values.detach().float()
        return LossOutputs(each.sum(), self._metrics(each, values, returns, clipped), {"values": per_token})

    def _metrics(self, each: Tensor, values: Tensor, returns: Tensor, clipped: Tensor) -> Metrics:
        metrics = Metrics()
        if not len(values):
            return metrics
        table = torch.stack([each.detach(), values.detach(), returns, clipped.to(each)]).double().cpu().numpy()
        losses, predicted, targets, bounded = table
        metrics.mean("critic/value_loss", losses.sum(), len(losses))
        metrics.mean("critic/value_mean", predicted.sum(), len(losses))
        metrics.mean("critic/return_mean", targets.sum(), len(losses))
        metrics.explained_variance("critic/explained_variance", predicted, targets)
        if self.clip_range is not None:
            metrics.mean("critic/clip_fraction", bounded.sum(), len(losses))
        return metrics


class ValuePrediction:
    """Forward only: ``values`` [N] before every action token (0 elsewhere) and ``bootstrap`` [B] after the last token."""

    needs = "value_head"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Values of a micro-batch.

        Raises:
            ValueError: shapes differ, or a trajectory has no tokens.
        """
        batch, hidden = inputs.batch, inputs.hidden
        check_rows(batch, len(hidden))
        rows, producers = action_rows(batch)
        with torch.no_grad():
            values = torch.zeros(batch.num_tokens, device=hidden.device)
            values[torch.from_numpy(rows).to(hidden.device)] = _values(inputs, producers).float()
            bootstrap = _values(inputs, last_rows(batch)).float()
        return LossOutputs(None, per_token={"values": values}, per_trajectory={"bootstrap": bootstrap})


def _values(inputs: LossInputs, rows: object) -> Tensor:
    """V of the states at ``rows``, fp32."""
    if inputs.value_head is None:
        raise ValueError("A value loss needs a value_head.")
    index = torch.as_tensor(rows, device=inputs.hidden.device)
    values = inputs.value_head(inputs.hidden.index_select(0, index))
    if values.shape != index.shape:
        raise ValueError(
            f"value_head returned shape {tuple(values.shape)} for {len(index)} states; it must return one value each."
        )
    return values if values.element_size() > 2 else values.float()
