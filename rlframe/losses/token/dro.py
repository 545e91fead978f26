"""Direct reward optimisation (DRO, arXiv 2405.19107): REINFORCE with a quadratic pull back to the sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from rlframe.losses.base import TokenTerms


@dataclass(frozen=True)
class DRO:
    """L = -(A log p - beta / 2 (log p - log q)^2)."""

    level: ClassVar[Literal["token"]] = "token"
    settings: ClassVar[tuple[str, ...]] = ()
    centering: ClassVar[None] = None
    """The pull does not scale with A."""
    beta: float = 0.05

    def __call__(self, logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor) -> TokenTerms:
        gap = logprobs - sampler_logprobs
        return TokenTerms(0.5 * self.beta * gap.square() - logprobs * advantages, self.beta * gap - advantages)
