"""The engine protocol: what a rollout worker needs from vLLM, SGLang or the torch reference sampler.

Tokens in, tokens out. Nothing here knows an environment, a reward or Ray.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

PauseMode = Literal["keep", "abort"]


class EngineDeadError(RuntimeError):
    """The engine can no longer serve; its worker has to be restarted."""


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


@dataclass(frozen=True)
class Stream:
    """Where an engine receives the tensors of a weight update that does not carry them."""

    address: str
    """Host of the learner's first rank."""
    port: int
    """Port of the rendezvous there."""
    names: list[str]
    """Hugging Face parameter names, in the order in which they are sent."""
    shapes: list[list[int]]
    """Of each."""
    first_rank: int = 1
    """Rank of the engine's first GPU in the communicator; the learner is rank 0."""
    ranks: int = 2
    """The learner and all GPUs of all engines."""


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


class Lifecycle(Protocol):
    """How every engine begins and ends. All methods of an engine are called from one asyncio loop."""

    async def start(self) -> None:
        """Make the engine ready; called once, before anything else.

        Raises:
            Exception: it cannot start, with the reason; what it had started is ended.
        """
        ...

    async def health(self) -> None:
        """Return if the engine can serve.

        Raises:
            EngineDeadError: it cannot, with the reason.
        """
        ...

    async def close(self) -> None:
        """Release processes and memory; requests in flight raise EngineDeadError, and so does every later call."""
        ...


class Engine(Lifecycle, Protocol):
    """The sampler of a rollout worker: it serves one policy, which changes under its requests.

    What is called when: `start`, then `generate`, `health` and updates (`pause`, `load_weights`, `resume`) in any order and at
    the same time, then `close`. ``tests/workers/test_engine_contract.py`` checks an engine against all of this.
    """

    version: int
    """Policy version now served; 0, the model's folder, until the first update."""

    async def generate(self, tokens: np.ndarray, params: SamplingParams) -> Completion:
        """Sample a continuation of ``tokens`` (int32[P], read-only); many calls run at once. A call that is cancelled ends its
        request alone.

        Raises:
            ValueError: the prompt is empty, it and the budget do not fit the engine's context, or the engine cannot sample as
                ``params`` ask.
            EngineDeadError: the engine died; requests in flight raise it too.
        """
        ...

    async def load_weights(self, update: WeightUpdate) -> str:
        """Serve ``update`` from now on and return a checksum (hex) of what is now served.

        The checksum is `rlframe.checksum.weights_checksum` of the parameters that the layers multiply by (for ``adapter``
        of the factors), read back after loading; the controller compares it with the actor's. Called between `pause` and
        `resume`; requests in flight continue under the new weights after the resume, from a key-value cache that is computed
        again.

        Raises:
            RuntimeError: the engine is not paused, or requests in flight cannot continue under such an update.
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
        """Continue sampling; requests that were kept or came meanwhile run."""
        ...
