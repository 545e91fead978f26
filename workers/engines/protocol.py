"""The engine protocol: what a rollout worker needs from vLLM, SGLang or the torch reference sampler.

Tokens in, tokens out. Nothing here knows an environment, a reward or Ray.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from workers.engines.vllm.nccl import Stream

PauseMode = Literal["keep", "abort"]


class EngineDeadError(RuntimeError):
    """The engine can serve no more; its worker has to be restarted."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. Immutable, so that concurrent requests cannot change each other's."""

    max_new_tokens: int
    """Budget of sampled tokens for this request."""
    temperature: float = 1.0
    """0 means greedy; log-probabilities are those of the processed (temperature-scaled) distribution."""
    top_p: float = 1.0
    """Nucleus mass; must be 1 with score centering."""
    top_k: int = 0
    """0 means the whole vocabulary; must be 0 with score centering."""
    logprobs: int = 0
    """k, width of the top-k head returned for each token."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the request; the stop token is part of the completion."""
    seed: int | None = None
    """Per-request seed; None leaves randomness to the engine."""


@dataclass
class Completion:
    """What one request returned; all arrays have one row per sampled token."""

    ids: np.ndarray
    """int32[n]"""
    logprobs: np.ndarray
    """float32[n], nats, processed."""
    head_ids: np.ndarray
    """int32[n, min(k, V)], distinct within a row, best first."""
    head_logprobs: np.ndarray
    """float32[n, min(k, V)], full-vocabulary normalised, -inf in padded entries."""
    versions: np.ndarray
    """int32[n], policy version that sampled each token."""
    finish: str
    """``stop`` (a stop token), ``length`` (the budget), ``abort``."""


@dataclass
class WeightUpdate:
    """New weights for an engine."""

    version: int
    """Policy version these weights are."""
    mode: str
    """``full`` (every parameter), ``merged`` (the base parameters that an adapter changes, already merged), ``adapter``
    (LoRA factors only)."""
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    """Hugging Face parameter names (for ``adapter``: PEFT names) to arrays; bfloat16 travels as uint16 bit patterns."""
    dtype: str = "float32"
    """Torch dtype of the tensors: ``float32``, ``bfloat16`` or ``float16``."""
    adapter: dict | None = None
    """For ``adapter``: the PEFT ``LoraConfig`` as a dictionary (r, lora_alpha, target_modules, ...)."""
    stream: Stream | None = None
    """Where the tensors come from if they are not in ``tensors``."""


class Engine(Protocol):
    """One sampler. All methods are called from one asyncio loop."""

    version: int
    """Policy version now served."""

    async def start(self) -> None:
        """Make the engine ready; called once, before anything else."""
        ...

    async def generate(self, tokens: np.ndarray, params: SamplingParams) -> Completion:
        """Sample a continuation of ``tokens`` (int32[P]).

        Raises:
            ValueError: the prompt is empty, or it and the budget do not fit the engine's context.
            EngineDeadError: the engine died; requests in flight raise it too.
        """
        ...

    async def load_weights(self, update: WeightUpdate) -> str:
        """Serve ``update`` from now on and return a checksum (hex) of what is now served.

        Called between `pause` and `resume`; requests in flight go on under the new weights after the resume.

        Raises:
            RuntimeError: the engine is not paused.
            ValueError: tensors are missing, unknown or of the wrong shape; the message names one.
        """
        ...

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling after the current step.

        ``keep`` freezes requests in flight until `resume`; ``abort`` ends each of them now, with what it has sampled and
        finish ``abort``. Requests that arrive later wait for `resume` in both modes.
        """
        ...

    async def resume(self) -> None:
        """Go on sampling."""
        ...

    async def health(self) -> None:
        """Return if the engine can serve; raise EngineDeadError with the reason if not."""
        ...

    async def close(self) -> None:
        """Release processes and memory."""
        ...
