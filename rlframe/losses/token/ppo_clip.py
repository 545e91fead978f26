"""PPO's clipped objective (arXiv 1707.06347) in bypass mode: the ratio is trainer over sampler and needs no further weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from torch import Tensor

from rlframe.config import AlgorithmConfig
from rlframe.losses.base import TokenTerms
from rlframe.losses.clipping import clip_band, clipped_surrogate


@dataclass(frozen=True)
class PPOClip:
    """L = -min(r A, clip(r, lower, upper) A), and at least -dual A where A < 0 (dual clip, arXiv 1912.09729)."""

    level: ClassVar[Literal["token"]] = "token"
    settings: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "clip_dual")
    centering: ClassVar[None] = None
    """Which ratios are clipped depends on the sign of the advantage, so no f(r) says what a score counts."""
    lower: float
    upper: float
    dual: float | None = None

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> Self:
        """The band is [1 - clip_low, 1 + clip_high]; ``clip_dual`` bounds the ratio of negative advantages."""
        return cls(*clip_band(algorithm), algorithm.clip_dual)

    def __call__(self, logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor) -> TokenTerms:
        return clipped_surrogate(logprobs - sampler_logprobs, advantages, self.lower, self.upper, self.dual)
