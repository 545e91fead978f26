"""What losses with a clipped ratio share: the band that the settings name, and PPO's surrogate of a ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from rlframe.config import AlgorithmConfig, ConfigError
from rlframe.losses.base import TokenTerms
from rlframe.losses.corrections import LOG_RATIO_BOUND, ratio, ratio_slope


def clip_band(algorithm: AlgorithmConfig, *, above_zero: bool = False) -> tuple[float, float]:
    """(1 - clip_low, 1 + clip_high).

    Raises:
        ConfigError: the lower end is negative, or 0 with ``above_zero``.
    """
    low, loss = algorithm.clip_low, f"algorithm.policy_loss={algorithm.policy_loss}"
    if low >= 1 and above_zero:
        raise ConfigError(
            f"algorithm.clip_low={low} makes the lower end of the ratio band 0 or less with {loss}; it must be below 1."
        )
    if low > 1:
        raise ConfigError(
            f"algorithm.clip_low={low} makes the lower end of the ratio band negative with {loss}; it must be at most 1."
        )
    return 1 - low, 1 + algorithm.clip_high


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, lower: float, upper: float, dual: float | None = None
) -> TokenTerms:
    """-min(r A, clip(r, lower, upper) A), and at least -dual A where A < 0, with its derivative by log r; all [A]."""
    r = ratio(log_ratio)
    bounded = r.clamp(lower, upper)
    clipped = bounded * advantages < r * advantages
    if dual is not None:
        bounded = torch.where((advantages < 0) & (r > dual), dual, bounded)
        clipped = clipped | ((advantages < 0) & (r > dual))
    loss = -torch.where(clipped, bounded, r) * advantages
    # dr / dlog p = r; a clipped ratio is a constant, and so is one beyond the clamp of the log-ratio.
    weight = torch.where(clipped, 0.0, ratio_slope(log_ratio))
    return TokenTerms(loss, -advantages * weight, weight, clipped | (log_ratio.abs() > LOG_RATIO_BOUND))
