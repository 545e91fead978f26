"""Rollout correction: the weight of a token or a trajectory, given trainer and sampler log-probabilities.

With q the sampler, p the trainer and r = p_y / q_y for the sampled token y, a *weight rule* f turns r into a weight, and
*rejection* drops tokens or whole trajectories that are too far off-policy. Log-ratios are clamped to +-20 before ``exp``;
selection is by ``where``, never by a product with a mask (0 * inf is NaN). Everything here is detached from the graph.

The losses that use the weights live in `rlframe.losses`, the centred scores in `rlframe.losses.score_centering`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rlframe.config import ConfigError
from rlframe.config.algorithm import parse_threshold
from rlframe.losses.sequences import Sequences

LOG_RATIO_BOUND = 20.0
"""exp(20) is 4.9e8: beyond it a ratio says only that something is wrong, and its square still fits fp32."""

REJECTION_OPTIONS = (
    *(f"{level}_k{n}" for level in ("token", "seq_sum", "seq_mean") for n in (1, 2, 3)),
    *(f"seq_max_k{n}" for n in (2, 3)),
)
"""What ``rollout_rs`` may name."""


def ratio(log_ratio: Tensor) -> Tensor:
    """exp of the clamped log-ratio, same shape; always finite for finite or infinite (not NaN) input."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def ratio_slope(log_ratio: Tensor) -> Tensor:
    """Derivative of `ratio` with respect to the log-ratio: the ratio itself, and 0 beyond the clamp, where it is constant."""
    return torch.where(log_ratio.abs() <= LOG_RATIO_BOUND, ratio(log_ratio), 0.0)


class WeightRule(Protocol):
    """f in L = -A sg[f(r)] log p."""

    def weight(self, log_ratio: Tensor) -> Tensor:
        """f(r) for log r of any shape."""
        ...

    def product(self, p: Tensor, q: Tensor, log_ratio: Tensor) -> Tensor:
        """q f(p / q) without the division, for probabilities of any shape; ``log_ratio`` is log p - log q."""
        ...


@dataclass(frozen=True)
class Unweighted:
    """f(r) = 1."""

    def weight(self, log_ratio: Tensor) -> Tensor:
        return torch.ones_like(log_ratio)

    def product(self, p: Tensor, q: Tensor, log_ratio: Tensor) -> Tensor:
        return q


@dataclass(frozen=True)
class Truncate:
    """f(r) = min(r, c), truncated importance sampling (TIS)."""

    upper: float

    def weight(self, log_ratio: Tensor) -> Tensor:
        return ratio(log_ratio).clamp(max=self.upper)

    def product(self, p: Tensor, q: Tensor, log_ratio: Tensor) -> Tensor:
        return torch.minimum(p, self.upper * q)


@dataclass(frozen=True)
class Band:
    """f(r) = r inside the band and 0 outside: closed for IcePop / MIS, open for DIS."""

    lower: float
    upper: float
    closed: bool = True

    def _inside(self, log_ratio: Tensor) -> Tensor:
        r = ratio(log_ratio)
        return (r >= self.lower) & (r <= self.upper) if self.closed else (r > self.lower) & (r < self.upper)

    def weight(self, log_ratio: Tensor) -> Tensor:
        return torch.where(self._inside(log_ratio), ratio(log_ratio), 0.0)

    def product(self, p: Tensor, q: Tensor, log_ratio: Tensor) -> Tensor:
        return torch.where(self._inside(log_ratio), p, 0.0)


@dataclass(frozen=True)
class Clamp:
    """f(r) = r clamped to an interval (CISPO)."""

    lower: float
    upper: float

    def weight(self, log_ratio: Tensor) -> Tensor:
        return ratio(log_ratio).clamp(self.lower, self.upper)

    def product(self, p: Tensor, q: Tensor, log_ratio: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(p, self.lower * q), self.upper * q)


def truncation(threshold: Any) -> WeightRule:
    """The rule that ``rollout_is_threshold`` names: a number c truncates at c, ``[lo, hi]`` zeroes outside [lo, hi].

    Raises:
        ConfigError: it is neither.
    """
    lower, upper = parse_threshold(threshold, "algorithm.rollout_is_threshold")
    return Truncate(upper) if lower is None else Band(lower, upper)


@dataclass(frozen=True)
class Rejection:
    """One rejection rule: keep where ``lower <= statistic <= upper``, the statistic being k1, k2 or k3 of a token, or its
    sum, mean or maximum over the action tokens of a trajectory."""

    option: str
    """One of `REJECTION_OPTIONS`."""
    lower: float
    upper: float

    def keep(self, log_ratio: Tensor, segments: Tensor, count: int) -> Tensor:
        """bool[A], the action tokens that stay.

        Args:
            log_ratio: [A], log p - log q of the action tokens.
            segments: int64[A], trajectory of each, in [0, count).
            count: number of trajectories.
        """
        level, _, kind = self.option.rpartition("_")
        statistic = _divergence(kind, log_ratio)
        if level != "token":
            sequences = Sequences(segments, count)
            reduce = {"seq_sum": sequences.sum, "seq_mean": sequences.mean, "seq_max": sequences.max}[level]
            statistic = sequences.spread(reduce(statistic))
        return (statistic >= self.lower) & (statistic <= self.upper)


def rejection(option: str | None, threshold: Any) -> Rejection | None:
    """The rule that ``rollout_rs`` and ``rollout_rs_threshold`` name; None keeps everything.

    k1 = -log r is compared with the logarithms of the bounds ``[lo, hi]`` (a single number c means ``[1/c, c]``), as in verl:
    ``token_k1`` with ``[0.5, 5.0]`` keeps r in [1/5, 1/0.5]. k2 and k3 are divergences and take one upper bound.

    Raises:
        ConfigError: an unknown option, or a threshold that does not fit it.
    """
    if option is None:
        return None
    if option not in REJECTION_OPTIONS:
        raise ConfigError(f"algorithm.rollout_rs={option} is not known; choose one of {', '.join(REJECTION_OPTIONS)}.")
    lower, upper = parse_threshold(threshold, "algorithm.rollout_rs_threshold")
    if option.endswith("k1"):
        lower = 1 / upper if lower is None else lower
        return Rejection(option, math.log(lower) if lower > 0 else -math.inf, math.log(upper))
    if lower is not None:
        raise ConfigError(
            f"algorithm.rollout_rs_threshold={threshold} is a band, but algorithm.rollout_rs={option} bounds a "
            "divergence, which takes one upper bound; write a single number."
        )
    return Rejection(option, -math.inf, upper)


def sequence_log_ratio(log_ratio: Tensor, segments: Tensor, count: int) -> Tensor:
    """[count], sum of the log-ratios over the action tokens of each trajectory."""
    return Sequences(segments, count).sum(log_ratio)


def _divergence(kind: str, log_ratio: Tensor) -> Tensor:
    log_r = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if kind == "k1":
        return -log_r
    # expm1 keeps k3 exact near r = 1, where exp(x) - 1 - x loses all digits of x^2 / 2.
    return log_r.square() / 2 if kind == "k2" else log_r.expm1() - log_r
