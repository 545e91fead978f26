"""Direct double-sided importance sampling (DIS) of SAO (arXiv 2607.07508): tokens outside an open ratio band are dropped."""

from __future__ import annotations

from typing import ClassVar, Self

from rlframe.config import AlgorithmConfig
from rlframe.losses.clipping import clip_band
from rlframe.losses.corrections import Band
from rlframe.losses.token.reinforce import Reinforce


class DIS(Reinforce):
    """f(r) = r if lower < r < upper, else 0, whatever the sign of the advantage.

    f is detached: with a live ratio the derivative of r log p is r (1 + log p), which points the wrong way below log p = -1.
    """

    settings: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")

    def __init__(self, lower: float, upper: float) -> None:
        super().__init__(Band(lower, upper, closed=False))

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> Self:
        """The band is (1 - clip_low, 1 + clip_high), and above 0."""
        return cls(*clip_band(algorithm, above_zero=True))
