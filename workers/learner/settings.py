"""The learner: settings of the actor and of the critic, and their checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from rlframe.config import LoraConfig, OptimConfig
from rlframe.config.lora import check_lora
from rlframe.config.optim import check_optim
from rlframe.config.validate import at_least, check_fields, choice, refuse


@dataclass
class ActorConfig:
    """The policy that is trained."""

    mode: str = field(default="lora", metadata=choice(("lora", "full")))
    """``lora`` (an adapter on the frozen base) or ``full`` (all weights)."""
    ranks: int = field(default=1, metadata=at_least(1))
    """Learner processes; the model is sharded over them by FSDP2."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """The adapter, in mode lora."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimiser."""
    frozen_patterns: list[str] = field(default_factory=list)
    """Parameters whose name contains one of these do not train; ``all-attention``: those of every layer through which tokens
    see each other, whatever the architecture calls it."""
    micro_batch_tokens: int = field(default=16384, metadata=at_least(1))
    """Most tokens of one forward and backward pass on one rank."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    cpus: float = field(default=1.0, metadata=at_least(0))
    """CPUs that Ray reserves for a rank."""
    gpus: float = field(default=0.0, metadata=at_least(0))
    """GPUs that Ray reserves for a rank."""
    threads: int = field(default=1, metadata=at_least(1))
    """CPU threads of a rank."""


@dataclass
class CriticConfig:
    """The value model; it exists when ``algorithm.advantage`` needs one, as gae does."""

    mode: str = field(default="lora", metadata=choice(("lora", "full")))
    """``lora`` (adapter and value head on the frozen base) or ``full`` (all weights)."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """The adapter, in mode lora."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=5e-6, warmup_steps=10))
    """The optimiser."""
    updates_per_step: int = field(default=2, metadata=at_least(1))
    """K: critic updates per policy step."""
    warmup_steps: int = field(default=0, metadata=at_least(0))
    """Steps of value pretraining at the start, during which the actor does not move."""
    vf_coef: float = field(default=1.0, metadata=at_least(0))
    """Factor of the value loss."""
    clip_range: Optional[float] = None
    """Clip of the new value around the old one; null: none."""
    frozen_patterns: list[str] = field(default_factory=list)
    """Parameters whose name contains one of these do not train; ``all-attention``: those of every layer through which tokens
    see each other, whatever the architecture calls it."""
    ensemble: int = field(default=1, metadata=at_least(1))
    """Critics whose values are averaged; each is one adapter."""


def check_actor(actor: ActorConfig, key: str = "actor") -> None:
    """Refuse what is out of range in the actor's settings, its adapter and its optimiser.

    Raises:
        ConfigError: one sentence that names the setting and says what to change.
    """
    check_fields(actor, key)
    check_lora(actor.lora, f"{key}.lora")
    check_optim(actor.optim, f"{key}.optim")
    _check_patterns(actor.frozen_patterns, key)


def check_critic(critic: CriticConfig, key: str = "critic") -> None:
    """Refuse what is out of range in the critic's settings, its adapter and its optimiser, and critics that need adapters.

    Raises:
        ConfigError: one sentence that names the setting and says what to change.
    """
    check_fields(critic, key)
    check_lora(critic.lora, f"{key}.lora", value_head=True)
    check_optim(critic.optim, f"{key}.optim")
    _check_patterns(critic.frozen_patterns, key)
    refuse(
        critic.ensemble > 1 and critic.mode == "full",
        f"{key}.ensemble={critic.ensemble} needs one adapter per critic and {key}.mode=full has none; set {key}.mode=lora.",
    )


def _check_patterns(patterns: list[str], key: str) -> None:
    empty = any(not pattern for pattern in patterns)
    refuse(empty, f"{key}.frozen_patterns has an empty pattern, which every parameter name contains; leave it out.")
