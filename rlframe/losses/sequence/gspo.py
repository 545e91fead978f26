"""GSPO (Group Sequence Policy Optimization, arXiv 2507.18071): one clipped ratio for a whole answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from torch import Tensor

from rlframe.config import AlgorithmConfig
from rlframe.losses.base import TokenTerms
from rlframe.losses.clipping import clip_band, clipped_surrogate
from rlframe.losses.sequences import Sequences


@dataclass(frozen=True)
class GSPO:
    """L = -min(s A, clip(s, lower, upper) A) on every token, with s = exp(mean of log r over the trajectory's action tokens).

    Written as the paper's GSPO-token (equations 13 and 14): token t has the ratio sg[s] p_t / sg[p_t], so its slope is -s A_t.
    With one advantage for the trajectory that is the derivative of n L, n its number of action tokens. The paper divides by n;
    here token sums are divided by the number of all action tokens, so a trajectory counts n over the mean length.
    """

    level: ClassVar[Literal["sequence"]] = "sequence"
    settings: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")
    centering: ClassVar[None] = None
    """The weight depends on all tokens of the trajectory."""
    lower: float
    upper: float

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> Self:
        """The band is [1 - clip_low, 1 + clip_high]."""
        return cls(*clip_band(algorithm))

    def __call__(self, logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, sequences: Sequences) -> TokenTerms:
        mean = sequences.spread(sequences.mean(logprobs - sampler_logprobs)).detach()
        return clipped_surrogate(mean + (logprobs - logprobs.detach()), advantages, self.lower, self.upper)
