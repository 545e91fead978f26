"""Losses whose targets are given position by position, as clients of the HTTP API send them: token sums, never shifted.

A datum has T input tokens and, for each of its T positions, K target tokens (K = 1 but for distillation) with weights,
advantages or log-probabilities; row t of the hidden states predicts the targets of row t. Trajectories with an action mask
and a shift are `rlframe.losses.policy`. The formulas are those of `rlframe.losses.token`, cell by cell, with the names and
defaults of `rlframe.losses.registry.API_LOSSES`; the gradient goes through `rlframe.losses.fused`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rlframe.columns import Column, TokenBatch
from rlframe.config import ConfigError
from rlframe.losses.base import LossInputs, LossOutputs, TokenLoss
from rlframe.losses.fused import Afterwards, Slopes, fused_loss
from rlframe.losses.registry import API_LOSSES
from rlframe.losses.value import squared_errors

Columns = dict[str, Tensor]
"""Inputs of some cells by name, all of one shape."""


class Targets(TokenBatch):
    """B data with N positions together: input tokens, and what a loss takes beside them, [N, K] each.

    Padded cells have weight 0.
    """

    target_tokens = Column[np.ndarray | None](np.int64, added=True)
    """int64[N, K]"""
    logprobs = Column[np.ndarray | None](np.float32, added=True)
    """float32[N, K], nats."""
    advantages = Column[np.ndarray | None](np.float32, added=True)
    """float32[N, K]"""
    weights = Column[np.ndarray | None](np.float32, added=True)
    """float32[N, K], any real numbers."""
    mask = Column[np.ndarray | None](np.float32, added=True)
    """float32[N, K], factors on loss and gradient."""
    returns = Column[np.ndarray | None](np.float32, added=True)
    """float32[N, K]"""
    old_values = Column[np.ndarray | None](np.float32, added=True)
    """float32[N, K]"""


def _times(factor: Tensor, x: Tensor) -> Tensor:
    """factor x, where a factor of 0 gives 0 whatever x is."""
    return torch.where(factor == 0, 0.0, factor * x)


def make_loss(name: str, config: Mapping[str, float]) -> TokenTargets | ValueTargets:
    """The loss ``name`` of `API_LOSSES` over `Targets`; settings that are left out have their defaults.

    Raises:
        ConfigError: no such loss, or it has no such setting.
    """
    if name not in API_LOSSES:
        raise ConfigError(f"loss_fn={name!r} is not known; choose one of {', '.join(API_LOSSES)}.")
    kind = API_LOSSES[name]
    if unknown := sorted(set(config) - set(kind.config)):
        raise ConfigError(
            f"loss_fn_config has {unknown[0]!r}, which loss_fn={name!r} does not take; "
            f"it takes {', '.join(kind.config) or 'no settings'}."
        )
    settings = {**kind.config, **config}
    if kind.make is None:
        return ValueTargets(trains=kind.trains, **settings)
    return TokenTargets(kind.make(**settings), kind.advantages)


class _Cells:
    """`rlframe.losses.fused.Objective`: K targets a position; statistics are the log-probabilities behind the first."""

    whole = False

    def __init__(self, loss: TokenLoss, advantages: str, columns: Columns) -> None:
        ids = columns["target_tokens"]
        self.tokens: Tensor = ids[:, 0]
        self.head_ids: Tensor | None = ids[:, 1:] if ids.shape[1] > 1 else None
        self._loss, self._advantages, self._columns = loss, advantages, columns

    def slopes(self, rows: slice, logprobs: Tensor, head_logprobs: Tensor) -> Slopes:
        cells = torch.cat([logprobs.unsqueeze(1), head_logprobs], 1)
        columns = {name: column[rows] for name, column in self._columns.items()}
        # Cross entropy has no sampler; its ratio is 1.
        terms = self._loss(cells, columns.get("logprobs", cells), columns[self._advantages])
        loss, slope = terms.loss, terms.slope
        if "mask" in columns:
            loss, slope = _times(columns["mask"], loss), _times(columns["mask"], slope)
        head = slope[:, 1:] if self.head_ids is not None else None
        return Slopes(slope[:, 0], head, loss.sum(1), {"head_logprobs": head_logprobs})

    def afterwards(self, logprobs: Tensor) -> Afterwards:
        return Afterwards(torch.ones_like(logprobs), None, {})


class TokenTargets:
    """A loss on target tokens; gives ``logprobs`` [N, K] of all targets and each datum's ``loss`` [B]."""

    needs = "lm_head"

    def __init__(self, loss: TokenLoss, advantages: str = "advantages") -> None:
        """``loss``: the formula of every cell; ``advantages``: the input that it takes as A."""
        self.loss, self.advantages = loss, advantages

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """The loss of a micro-batch of `Targets`.

        Raises:
            ValueError: there is no lm_head.
        """
        if inputs.lm_head is None:
            raise ValueError("A loss on tokens needs the lm_head.")
        columns = _columns(inputs)
        out = fused_loss(inputs.hidden, inputs.lm_head, _Cells(self.loss, self.advantages, columns))
        logprobs = torch.cat([out.logprobs.unsqueeze(1), out.stats["head_logprobs"]], 1).float()
        return LossOutputs(out.loss, per_token={"logprobs": logprobs}, per_trajectory={"loss": _per_datum(inputs, out.losses)})


class ValueTargets:
    """0.5 vf_coef sum w (V - R)^2 over positions, and ``state_values`` [N] of every position, masked or not.

    V of row t is the value of the state after input token t. ``moments`` of the weighted positions travel as sums, so that
    explained variance can be had from any split of the data. Without ``trains`` there is no loss, only the values.
    """

    needs = "value_head"

    def __init__(self, trains: bool = True, vf_coef: float = 1.0, clip_range: float = float("nan")) -> None:
        self.trains, self.vf_coef = trains, vf_coef
        self.clip_range = clip_range if clip_range == clip_range else None

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """The loss of a micro-batch of `Targets`.

        Raises:
            ValueError: there is no value_head.
        """
        if inputs.value_head is None:
            raise ValueError("A loss on values needs the value_head.")
        values = inputs.value_head(inputs.hidden)
        per_token = {"state_values": values.detach().float()}
        if not self.trains:
            return LossOutputs(None, per_token=per_token)
        columns = {name: column[:, 0] for name, column in _columns(inputs).items()}
        weights, returns, old = columns["weights"], columns["returns"], columns.get("old_values")
        errors, clipped = squared_errors(values, returns, old, self.clip_range)
        each = 0.5 * self.vf_coef * _times(weights, errors)
        counted = (weights != 0).double()
        predicted, wanted = values.detach().double(), returns.double()
        sums = {
            "loss": each.detach(),
            "value_count": counted,
            "value_sum": _times(counted, predicted),
            "return_sum": _times(counted, wanted),
            "return_sq": _times(counted, wanted.square()),
            "residual_sum": _times(counted, wanted - predicted),
            "residual_sq": _times(counted, (wanted - predicted).square()),
            "clipped_count": counted * clipped,
        }
        moments = {name: _per_datum(inputs, column) for name, column in sums.items()}
        return LossOutputs(each.sum(), per_token=per_token, per_trajectory=moments)


def _columns(inputs: LossInputs) -> Columns:
    columns, device = inputs.batch.columns, inputs.hidden.device
    return {name: torch.from_numpy(column).to(device) for name, column in columns.items() if name != "tokens"}


def _per_datum(inputs: LossInputs, column: Tensor) -> Tensor:
    """float64[B], sums over each datum of the micro-batch."""
    lengths = torch.from_numpy(inputs.batch.lengths).to(column.device)
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=column.device), lengths)
    return torch.zeros(len(lengths), dtype=torch.float64, device=column.device).index_add_(0, owner, column.double())
