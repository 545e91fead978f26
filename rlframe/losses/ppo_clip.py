"""PPO's clipped objective (arXiv 1707.06347) in bypass mode: the ratio is trainer over sampler and needs no further weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlframe.config import AlgorithmConfig
from rlframe.losses.base import TokenLoss
from rlframe.losses.corrections import LOG_RATIO_BOUND, ratio, ratio_slope


@dataclass(frozen=True)
class PPOClip:
    """L = -min(r A, clip(r, lower, upper) A), and at least -dual A where A < 0 (dual clip, arXiv 1912.09729)."""

    centering: ClassVar[None] = None
    """Which ratios are clipped depends on the sign of the advantage, so no f(r) says what a score counts."""
    lower: float
    upper: float
    dual: float | None = None

    def __call__(self, logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor) -> TokenLoss:
        log_ratio = logprobs - sampler_logprobs
        r = ratio(log_ratio)
        bounded = r.clamp(self.lower, self.upper)
        clipped = bounded * advantages < r * advantages
        if self.dual is not None:
            bounded = torch.where((advantages < 0) & (r > self.dual), self.dual, bounded)
            clipped = clipped | ((advantages < 0) & (r > self.dual))
        loss = -torch.where(clipped, bounded, r) * advantages
        # dr / dlog p = r; a clipped ratio is a constant, and so is one beyond the clamp of the log-ratio.
        weight = torch.where(clipped, 0.0, ratio_slope(log_ratio))
        return TokenLoss(loss, -advantages * weight, weight, clipped | (log_ratio.abs() > LOG_RATIO_BOUND))


def ppo_clip(algorithm: AlgorithmConfig) -> PPOClip:
    """The band is [1 - clip_low, 1 + clip_high]; ``clip_dual`` bounds the ratio of negative advantages."""
    return PPOClip(1 - algorithm.clip_low, 1 + algorithm.clip_high, algorithm.clip_dual)
