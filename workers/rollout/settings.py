"""Settings of the samplers and their check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from rlframe.config import MODEL_DTYPES, QUANTIZED
from rlframe.config.validate import above, at_least, check_fields, choice, refuse, rule

ENGINE_DTYPES = (*MODEL_DTYPES, "float16")
"""Dtypes of an engine's weights, and of weights in transit."""


@dataclass
class RolloutConfig:
    """The samplers."""

    engine: str = "vllm"
    """Name of the engine, such as vllm or torch (docs/engines.md has all); or ``module:ENGINE`` of your own."""
    workers: int = field(default=1, metadata=at_least(1))
    """Rollout workers, each one Ray actor that owns one engine."""
    temperature: float = 1.0
    """Sampling temperature; the trainer divides its logits by the same number."""
    top_p: float = field(default=1.0, metadata=rule(lambda v: 0 < v <= 1, "above 0 and at most 1"))
    """Nucleus mass; only 1, since the tokens that a smaller one keeps do not travel with a trajectory."""
    top_k: int = field(default=0, metadata=at_least(0))
    """Sample among the k likeliest tokens only; only 0, which means all, for the same reason."""
    head_size: int = field(default=128, metadata=at_least(0))
    """k of the top-k log-probabilities returned for every token, capped at the vocabulary; used with score centering."""
    max_new_tokens: int = field(default=64, metadata=at_least(1))
    """Budget of sampled tokens per turn."""
    segment_tokens: Optional[int] = field(default=None, metadata=at_least(1, optional=True))
    """Hand an episode to the learner in pieces of so many sampled tokens, each ended by the critic's value where the episode
    continues; ``batch_size`` then counts pieces. null: whole episodes. Needs a critic and single rollouts."""
    max_model_len: int = field(default=1024, metadata=at_least(1))
    """Longest trajectory the engine can hold, prompt included."""
    weight_sync: str = field(default="auto", metadata=choice(("auto", "merged", "adapter", "full")))
    """``merged`` or ``adapter`` (LoRA actor), ``full`` (full weights); auto: merged or full."""
    weight_channel: str = "ray"
    """How they travel: ``ray`` (through Ray's object store) or ``nccl`` (full weights from GPU to GPU, by vLLM's weight
    transfer)."""
    on_update: str = "keep"
    """What happens to requests in flight when new weights arrive: ``keep`` (frozen, then on under the new weights) or
    ``abort`` (ended, and re-issued with what they had sampled)."""
    dtype: str = field(default="float32", metadata=choice(ENGINE_DTYPES))
    """``float32``, ``bfloat16`` or ``float16``, of the engine's weights."""
    quantize: Optional[str] = field(default=None, metadata=choice(QUANTIZED, optional=True))
    """Round what is served to ``int8``, ``int4``, ``int3`` or ``fp8`` per output channel: a stand-in for a low-precision
    engine. Held-out problems are then answered by one more engine, under the actor's own weights."""
    weight_noise: float = field(default=0.0, metadata=at_least(0))
    """Noise on what is served, redrawn at every sync, relative to the root mean square of an output channel."""
    max_concurrency: int = field(default=256, metadata=at_least(1))
    """Episodes that one worker runs at once."""
    probe_every: int = field(default=10, metadata=at_least(0))
    """Every so many weight syncs the engine's log-probabilities of a fixed prompt are compared with the actor's; 0: never,
    as with ``quantize`` or ``weight_noise``."""
    probe_tolerance: float = field(default=1e-3, metadata=at_least(0))
    """Largest difference accepted by that comparison, nats (raise it for bfloat16 engines)."""
    timeout_s: float = field(default=600.0, metadata=above(0))
    """Longest time one episode, a piece of one or one engine call may take; a worker that does not answer for so long is
    started again."""
    max_restarts: int = field(default=5, metadata=at_least(0))
    """Times that one rollout worker is started again after its process, its engine or its node was lost; then the run continues
    with the others, and ends when none is left."""
    cpus: float = field(default=1.0, metadata=at_least(0))
    """CPUs that Ray reserves for a worker."""
    gpus: float = field(default=0.0, metadata=at_least(0))
    """GPUs that Ray reserves for a worker."""
    tensor_parallel_size: int = field(default=1, metadata=at_least(1))
    """GPUs that one engine spans."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """More arguments of the engine."""
    server_urls: list[str] = field(default_factory=list)
    """sglang: addresses of running servers, one for each worker; empty: every worker starts its own."""
    weights_dir: Optional[str] = None
    """sglang: folder that new weights pass through, seen by worker and server alike; null: memory of the worker's machine."""


def serves_other_weights(rollout: RolloutConfig) -> bool:
    """Whether the engines are deliberately given weights that differ from the actor's."""
    return rollout.quantize is not None or rollout.weight_noise > 0


def check_rollout(r: RolloutConfig, key: str = "rollout") -> None:
    """Refuse sampling that cannot be trained on, and settings of the engines that do not go together.

    Raises:
        ConfigError: one sentence that names the setting and says what to change.
    """
    check_fields(r, key)
    refuse(
        not r.temperature > 0,
        f"{key}.temperature={r.temperature} cannot be trained on, since the logits are divided by it; it must be above 0.",
    )
    for name, value, neutral in (("top_p", r.top_p, 1), ("top_k", r.top_k, 0)):
        refuse(
            value != neutral,
            f"{key}.{name}={value} makes the sampler renormalise over the tokens that it kept and the trainer knows only the "
            f"whole vocabulary, so every ratio of the two would be off by the mass that was kept; set {key}.{name}={neutral}.",
        )
    refuse(
        r.max_new_tokens >= r.max_model_len,
        f"{key}.max_new_tokens={r.max_new_tokens} leaves no room for a prompt in {key}.max_model_len={r.max_model_len}; "
        f"raise {key}.max_model_len.",
    )
    refuse(
        serves_other_weights(r) and r.weight_sync in ("merged", "adapter"),
        f"{key}.weight_sync={r.weight_sync} does not send the weights that {key}.quantize and {key}.weight_noise change; "
        f"set {key}.weight_sync=auto.",
    )
    refuse(
        0 < r.gpus < r.tensor_parallel_size,
        f"{key}.gpus={r.gpus:g} is fewer than {key}.tensor_parallel_size={r.tensor_parallel_size}; raise {key}.gpus.",
    )
