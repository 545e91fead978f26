"""CISPO (MiniMax-M1, arXiv 2506.13585): the importance weight is clipped and detached, so that no token loses its gradient."""

from __future__ import annotations

from typing import ClassVar, Self

from rlframe.config import AlgorithmConfig
from rlframe.losses.clipping import clip_band
from rlframe.losses.corrections import Clamp
from rlframe.losses.token.reinforce import Reinforce


class CISPO(Reinforce):
    """f(r) = r clamped to [lower, upper]."""

    settings: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")

    def __init__(self, lower: float, upper: float) -> None:
        super().__init__(Clamp(lower, upper))

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> Self:
        """The interval is [1 - clip_low, 1 + clip_high]."""
        return cls(*clip_band(algorithm))
