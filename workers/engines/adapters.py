"""The protocol of a sampler that serves many adapters at once; `workers.engines.protocol` has the one for a single policy.

An adapter is a PEFT folder that never changes; a request names the one that it runs under, or none for the base model. See
`workers.engines.torch.adapters` and `workers.engines.vllm.adapters` for how engines hold them.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from workers.engines.protocol import Completion, Lifecycle, SamplingParams


@dataclass(frozen=True)
class ServedAdapter:
    """One version of one policy."""

    key: str
    """Unique forever: names are reused after a deletion, keys are not."""
    folder: str
    """PEFT folder, on a path that all samplers see."""


@dataclass
class PromptScores:
    """Log-probabilities of a prompt of P tokens at temperature 1; row t describes token t, row 0 is NaN."""

    logprobs: np.ndarray
    """float32[P], nats."""
    top_ids: np.ndarray
    """int32[P, k], likeliest first; k may be 0."""
    top_logprobs: np.ndarray
    """float32[P, k]"""
    target_logprobs: np.ndarray | None = None
    """float32[P - 1, K] of the tokens asked for, row t about position t + 1; 0 where -1 was asked for."""
    drawn_ids: np.ndarray | None = None
    """int64[P - 1, n], tokens drawn at every position after the first."""
    drawn_logprobs: np.ndarray | None = None
    """float32[P - 1, n], under the distribution that they were drawn from."""


@dataclass(frozen=True)
class ScoreRequest:
    """What to compute for a prompt."""

    top_k: int = 0
    """Width of the heads."""
    targets: np.ndarray | None = None
    """int64[P - 1, K], tokens to score at positions after the first; -1 asks for nothing."""
    draws: int = 0
    """Tokens to draw at every position."""
    temperature: float = 1.0
    """Of the draws."""
    seed: int | None = None
    """Of the draws."""


class AdapterEngine(Lifecycle, Protocol):
    """The sampler of the server: it serves many adapters at once, none of which changes."""

    async def sample(self, tokens: np.ndarray, params: SamplingParams, adapter: ServedAdapter | None) -> Completion:
        """Sample a continuation of ``tokens`` (int32[P]).

        Raises:
            ValueError: the prompt is empty, or it and the budget do not fit the engine's context.
        """
        ...

    async def score(self, tokens: np.ndarray, request: ScoreRequest, adapter: ServedAdapter | None) -> PromptScores:
        """Log-probabilities of ``tokens`` (int32[P]).

        Raises:
            ValueError: the engine cannot give what is asked for.
        """
        ...

    async def forget(self, adapter: ServedAdapter) -> None:
        """Free the memory of an adapter that no request runs under and none will; nothing happens if it is not held."""
        ...


CURRENT: ContextVar[ServedAdapter | None] = ContextVar("adapter", default=None)
"""The adapter of the request that the running task belongs to."""
