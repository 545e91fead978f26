"""Direct double-sided importance sampling (DIS) of SAO (arXiv 2607.07508): tokens outside an open ratio band are dropped."""

from __future__ import annotations

from rlframe.config import AlgorithmConfig
from rlframe.losses.corrections import Band
from rlframe.losses.reinforce import WeightedScore


def dis(algorithm: AlgorithmConfig) -> WeightedScore:
    """f(r) = r if 1 - clip_low < r < 1 + clip_high, else 0, whatever the sign of the advantage.

    f is detached: with a live ratio the derivative of r log p is r (1 + log p), which points the wrong way below log p = -1.
    """
    return WeightedScore(Band(1 - algorithm.clip_low, 1 + algorithm.clip_high, closed=False))
