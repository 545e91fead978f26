"""Losses whose targets are given position by position, as clients of the HTTP API send them: token sums, never shifted.

A datum has T input tokens and, for each of its T positions, K target tokens (K = 1 but for distillation) with weights,
advantages or log-probabilities; row t of the hidden states predicts the targets of row t. Trajectories with an action mask
and a shift are `rlframe.losses.policy`. The gradient goes through `rlframe.losses.fused`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlframe.columns import Column, TokenBatch
from rlframe.config import ConfigError
from rlframe.losses.base import LossInputs, LossOutputs
from rlframe.losses.corrections import ratio, ratio_slope
from rlframe.losses.fused import Slopes, fused_loss
from rlframe.losses.value import squared_errors

Columns = dict[str, Tensor]
"""Inputs of some cells by name, all of one shape."""
TokenRule = Callable[[Tensor, Columns], tuple[Tensor, Tensor]]
"""Log-probabilities and the inputs -> the loss of every cell and its derivative with respect to the log-probability."""


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


def cross_entropy(logprobs: Tensor, inputs: Columns) -> tuple[Tensor, Tensor]:
    """-w log p; weights are any real numbers."""
    return -_times(inputs["weights"], logprobs), -inputs["weights"]


def importance_sampling(logprobs: Tensor, inputs: Columns) -> tuple[Tensor, Tensor]:
    """-exp(log p - log q) A."""
    log_ratio, advantages = logprobs - inputs["logprobs"], inputs["advantages"]
    return -ratio(log_ratio) * advantages, -ratio_slope(log_ratio) * advantages


def ppo(low: float, high: float) -> TokenRule:
    """-min(r A, clip(r, low, high) A) with absolute thresholds (arXiv 1707.06347)."""

    def rule(logprobs: Tensor, inputs: Columns) -> tuple[Tensor, Tensor]:
        log_ratio, advantages = logprobs - inputs["logprobs"], inputs["advantages"]
        plain, bounded = ratio(log_ratio) * advantages, ratio(log_ratio).clamp(low, high) * advantages
        slope = torch.where(bounded < plain, 0.0, -ratio_slope(log_ratio) * advantages)
        return -torch.minimum(plain, bounded), slope

    return rule


def cispo(low: float, high: float) -> TokenRule:
    """-sg[clip(r, low, high)] log p A (arXiv 2506.13585)."""

    def rule(logprobs: Tensor, inputs: Columns) -> tuple[Tensor, Tensor]:
        slope = -ratio(logprobs - inputs["logprobs"]).clamp(low, high) * inputs["advantages"]
        return _times(slope, logprobs), slope

    return rule


def dis(low: float, high: float) -> TokenRule:
    """-sg[r if low < r < high else 0] log p A (SAO, arXiv 2607.07508)."""

    def rule(logprobs: Tensor, inputs: Columns) -> tuple[Tensor, Tensor]:
        r = ratio(logprobs - inputs["logprobs"])
        slope = torch.where((low < r) & (r < high), -r * inputs["advantages"], 0.0)
        return _times(slope, logprobs), slope

    return rule


def dro(beta: float) -> TokenRule:
    """-(log p A - beta / 2 (log p - log q)^2)."""

    def rule(logprobs: Tensor, inputs: Columns) -> tuple[Tensor, Tensor]:
        gap, advantages = logprobs - inputs["logprobs"], inputs["advantages"]
        return 0.5 * beta * gap.square() - logprobs * advantages, beta * gap - advantages

    return rule


def _times(factor: Tensor, x: Tensor) -> Tensor:
    """factor x, where a factor of 0 gives 0 whatever x is."""
    return torch.where(factor == 0, 0.0, factor * x)


@dataclass(frozen=True)
class LossKind:
    """What a loss takes."""

    needs: str
    """``lm_head`` or ``value_head``."""
    required: tuple[str, ...]
    """Inputs of every datum."""
    optional: tuple[str, ...] = ()
    """Inputs that may be left out."""
    config: Mapping[str, float] = field(default_factory=dict)
    """Settings with their defaults; NaN: off."""
    trains: bool = True
    """False: for forward passes only."""
    rule: Callable[..., TokenRule] | None = None
    """Builds the rule of a loss on tokens from the settings."""


_POLICY = ("target_tokens", "logprobs", "advantages")
_OFF = float("nan")

LOSSES: dict[str, LossKind] = {
    "cross_entropy": LossKind("lm_head", ("target_tokens",), ("weights",), rule=lambda: cross_entropy),
    "importance_sampling": LossKind("lm_head", _POLICY, ("weights",), rule=lambda: importance_sampling),
    "ppo": LossKind("lm_head", _POLICY, ("weights",), {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, rule=ppo),
    "cispo": LossKind("lm_head", _POLICY, ("weights",), {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}, rule=cispo),
    "dis": LossKind("lm_head", _POLICY, ("weights",), {"clip_low_threshold": 0.7, "clip_high_threshold": 6.0}, rule=dis),
    "dro": LossKind("lm_head", _POLICY, ("weights",), {"beta": 0.05}, rule=dro),
    "value_loss": LossKind(
        "value_head", ("returns",), ("weights", "old_values", *_POLICY), {"vf_coef": 1.0, "clip_range": _OFF}
    ),
    "value_prediction": LossKind("value_head", (), ("weights", "returns", "old_values", *_POLICY), trains=False),
}
"""Loss names of the API."""


def make_loss(name: str, config: Mapping[str, float]) -> TokenTargets | ValueTargets:
    """The loss ``name`` over `Targets`; settings that are left out have their defaults.

    Raises:
        ConfigError: no such loss, or it has no such setting.
    """
    if name not in LOSSES:
        raise ConfigError(f"loss_fn={name!r} is not known; choose one of {', '.join(LOSSES)}.")
    kind = LOSSES[name]
    if unknown := sorted(set(config) - set(kind.config)):
        raise ConfigError(
            f"loss_fn_config has {unknown[0]!r}, which loss_fn={name!r} does not take; it takes {_listed(kind.config)}."
        )
    settings = {**kind.config, **config}
    if kind.rule is None:
        return ValueTargets(trains=kind.trains, **settings)
    if "clip_low_threshold" in settings:
        return TokenTargets(kind.rule(settings["clip_low_threshold"], settings["clip_high_threshold"]))
    return TokenTargets(kind.rule(**settings))


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(names) or "no settings"


class _Cells:
    """`rlframe.losses.fused.Objective`: K targets a position, stats are the loss and the log-probabilities behind the first."""

    has_factors = False

    def __init__(self, rule: TokenRule, columns: Columns) -> None:
        ids = columns["target_tokens"]
        self.tokens: Tensor = ids[:, 0]
        self.head_ids: Tensor | None = ids[:, 1:] if ids.shape[1] > 1 else None
        self._rule, self._columns = rule, columns

    def slopes(self, rows: slice, logprobs: Tensor, head_logprobs: Tensor) -> Slopes:
        cells = torch.cat([logprobs.unsqueeze(1), head_logprobs], 1)
        columns = {name: column[rows] for name, column in self._columns.items()}
        loss, slope = self._rule(cells, columns)
        if "mask" in columns:
            loss, slope = _times(columns["mask"], loss), _times(columns["mask"], slope)
        stats = torch.cat([loss.sum(1, keepdim=True), head_logprobs], 1).T
        return Slopes(slope[:, 0], slope[:, 1:] if self.head_ids is not None else None, stats)

    def factors(self, logprobs: Tensor) -> Tensor:
        return torch.ones_like(logprobs)


class TokenTargets:
    """A loss on target tokens; gives ``logprobs`` [N, K] of all targets and each datum's ``loss`` [B]."""

    needs = "lm_head"

    def __init__(self, rule: TokenRule) -> None:
        self.rule = rule

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """The loss of a micro-batch of `Targets`.

        Raises:
            ValueError: there is no lm_head.
        """
        if inputs.lm_head is None:
            raise ValueError("A loss on tokens needs the lm_head.")
        columns = _columns(inputs)
        out = fused_loss(inputs.hidden, inputs.lm_head, _Cells(self.rule, columns))
        logprobs = torch.cat([out.logprobs.unsqueeze(1), out.stats[1:].T], 1).float()
        return LossOutputs(
            out.loss, per_token={"logprobs": logprobs}, per_trajectory={"loss": _per_datum(inputs, out.stats[0])}
        )


class ValueTargets:
    """0.5 vf_coef sum w (V - R)^2 over positions, and ``state_values`` [N] of every position, masked or not.

    V of row t is the value of the state after input token t. ``moments`` of the weighted positions travel as sums, so that
    explained variance can be had from any split of the data. Without ``trains`` there is no loss, only the values.
    """

    needs = "value_head"

    def __init__(self, trains: bool = True, vf_coef: float = 1.0, clip_range: float = _OFF) -> None:
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
