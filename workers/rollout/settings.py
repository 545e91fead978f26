"""The samplers: their settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from rlframe.config import MODEL_DTYPES

ENGINE_DTYPES = (*MODEL_DTYPES, "float16")
"""What an engine's weights may be, and what weights travel as."""


@dataclass
class RolloutConfig:
    """The samplers."""

    engine: str = "vllm"
    """``vllm``, ``sglang`` or ``torch``."""
    workers: int = 1
    """Rollout workers, each one Ray actor that owns one engine."""
    temperature: float = 1.0
    """Sampling temperature; the trainer divides its logits by the same number."""
    top_p: float = 1.0
    """Nucleus mass; only 1, since the tokens that a smaller one keeps do not travel with a trajectory."""
    top_k: int = 0
    """Sample among the k likeliest tokens only; only 0, which means all, for the same reason."""
    head_size: int = 128
    """k of the top-k log-probabilities returned for every token, capped at the vocabulary; used with score centering."""
    max_new_tokens: int = 64
    """Budget of sampled tokens per turn."""
    max_model_len: int = 1024
    """Longest trajectory the engine can hold, prompt included."""
    weight_sync: str = "auto"
    """``merged`` or ``adapter`` (LoRA actor), ``full`` (full weights); auto: merged or full."""
    weight_channel: str = "ray"
    """How they travel: ``ray`` (through Ray's object store) or ``nccl`` (full weights from GPU to GPU, by vLLM's weight
    transfer)."""
    on_update: str = "keep"
    """What happens to requests in flight when new weights arrive: ``keep`` (frozen, then on under the new weights) or
    ``abort`` (ended, and re-issued with what they had sampled)."""
    dtype: str = "float32"
    """``float32``, ``bfloat16`` or ``float16``, of the engine's weights."""
    quantize: Optional[str] = None
    """Round what is served to ``int8``, ``int4``, ``int3`` or ``fp8`` per output channel: a stand-in for a low-precision
    engine. Held-out problems are then answered by one more engine, under the actor's own weights."""
    weight_noise: float = 0.0
    """Noise on what is served, drawn anew at every sync, relative to the root mean square of an output channel."""
    max_concurrency: int = 256
    """Episodes that one worker runs at once."""
    probe_every: int = 10
    """Every so many weight syncs the engine's log-probabilities of a fixed prompt are compared with the actor's; 0: never,
    as with ``quantize`` or ``weight_noise``."""
    probe_tolerance: float = 1e-3
    """Largest difference accepted by that comparison, nats (raise it for bfloat16 engines)."""
    timeout_s: float = 600.0
    """Longest time one episode or one engine call may take; a worker that does not answer for so long is started again."""
    max_restarts: int = 5
    """Times that one rollout worker is started again after its process, its engine or its node was lost; then the run goes on
    with the others, and ends when none is left."""
    cpus: float = 1.0
    """CPUs that Ray reserves for a worker."""
    gpus: float = 0.0
    """GPUs that Ray reserves for a worker."""
    tensor_parallel_size: int = 1
    """GPUs that one engine spans."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """More arguments of the engine."""
    server_urls: list[str] = field(default_factory=list)
    """sglang: addresses of running servers, one for each worker; empty: every worker starts its own."""
    weights_dir: Optional[str] = None
    """sglang: folder that new weights pass through, seen by worker and server alike; null: memory of the worker's machine."""


def serves_other_weights(rollout: RolloutConfig) -> bool:
    """Whether the engines are given weights that are not the actor's, on purpose."""
    return rollout.quantize is not None or rollout.weight_noise > 0
