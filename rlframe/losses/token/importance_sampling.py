"""The policy gradient with a live, unbounded importance ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from rlframe.losses.base import TokenTerms
from rlframe.losses.corrections import LOG_RATIO_BOUND, ratio, ratio_slope


@dataclass(frozen=True)
class ImportanceSampling:
    """L = -r A, r = p / q; its derivative is -r A grad log p, that of REINFORCE weighted by r."""

    level: ClassVar[Literal["token"]] = "token"
    settings: ClassVar[tuple[str, ...]] = ()
    centering: ClassVar[None] = None
    """L is not of the form -A sg[f(r)] log p; ``reinforce`` with token weights is, and can be centred."""

    def __call__(self, logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor) -> TokenTerms:
        log_ratio = logprobs - sampler_logprobs
        weight = ratio_slope(log_ratio)
        return TokenTerms(-ratio(log_ratio) * advantages, -advantages * weight, weight, log_ratio.abs() > LOG_RATIO_BOUND)
