"""CISPO (MiniMax-M1, arXiv 2506.13585): the importance weight is clipped and detached, so that no token loses its gradient."""

from __future__ import annotations

from rlframe.config import AlgorithmConfig
from rlframe.losses.corrections import Clamp
from rlframe.losses.reinforce import WeightedScore


def cispo(algorithm: AlgorithmConfig) -> WeightedScore:
    """f(r) = r clamped to [1 - clip_low, 1 + clip_high]."""
    return WeightedScore(Clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high))
