"""The learner: settings of the actor and of the critic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from rlframe.config import LoraConfig, OptimConfig


@dataclass
class ActorConfig:
    """The policy that is trained."""

    mode: str = "lora"
    """``lora`` (an adapter on the frozen base) or ``full`` (all weights)."""
    ranks: int = 1
    """Learner processes; the model is sharded over them by FSDP2."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """The adapter, in mode lora."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimiser."""
    frozen_patterns: list[str] = field(default_factory=list)
    """Parameters whose name contains one of these do not train; ``all-attention``: those of every layer through which tokens
    see each other, whatever the architecture calls it."""
    micro_batch_tokens: int = 16384
    """Most tokens of one forward and backward pass on one rank."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    cpus: float = 1.0
    """CPUs that Ray reserves for a rank."""
    gpus: float = 0.0
    """GPUs that Ray reserves for a rank."""
    threads: int = 1
    """CPU threads of a rank."""


@dataclass
class CriticConfig:
    """The value model; it exists when ``algorithm.advantage`` is gae."""

    mode: str = "lora"
    """``lora`` (adapter and value head on the frozen base) or ``full`` (all weights)."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """The adapter, in mode lora."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=5e-6, warmup_steps=10))
    """The optimiser."""
    updates_per_step: int = 2
    """K: critic updates per policy step."""
    warmup_steps: int = 0
    """Steps of value pretraining at the start, during which the actor does not move."""
    vf_coef: float = 1.0
    """Factor of the value loss."""
    clip_range: Optional[float] = None
    """Clip of the new value around the old one; null: none."""
    frozen_patterns: list[str] = field(default_factory=list)
    """Parameters whose name contains one of these do not train; ``all-attention``: those of every layer through which tokens
    see each other, whatever the architecture calls it."""
    ensemble: int = 1
    """Critics whose values are averaged; each is one adapter."""
    per_env: bool = False
    """One critic for each environment of the run; a trajectory of any other environment is an error."""
