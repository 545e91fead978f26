"""The optimiser: its settings and their check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from rlframe.config.validate import above, at_least, between, check_fields, choice, refuse, rule


def _two_decays(betas: list[float]) -> bool:
    return len(betas) == 2 and all(0 <= beta < 1 for beta in betas)


@dataclass
class OptimConfig:
    """AdamW with a schedule and a gradient clip."""

    lr: float = field(default=1e-6, metadata=rule(lambda v: 0 <= v < float("inf"), "at least 0"))
    """Learning rate."""
    betas: list[float] = field(
        default_factory=lambda: [0.9, 0.95],
        metadata=rule(_two_decays, "two numbers at least 0 and below 1"),
    )
    """Adam's decay rates."""
    eps: float = field(default=1e-8, metadata=above(0))
    """Adam's epsilon."""
    weight_decay: float = field(default=0.0, metadata=at_least(0))
    """Decoupled weight decay."""
    max_grad_norm: Optional[float] = field(default=1.0, metadata=above(0, optional=True))
    """Clip of the global gradient norm; null: none."""
    schedule: str = field(default="constant", metadata=choice(("constant", "linear", "cosine")))
    """``constant``, ``linear`` or ``cosine`` after the warm-up."""
    warmup_steps: int = field(default=0, metadata=at_least(0))
    """Optimiser steps of linear warm-up."""
    total_steps: Optional[int] = None
    """Optimiser steps after which a decaying schedule ends."""
    min_lr_ratio: float = field(default=0.0, metadata=between(0, 1))
    """Fraction of lr that a decaying schedule ends at."""


def check_optim(optim: OptimConfig, key: str = "optim") -> None:
    """Refuse rates, clips and schedules that cannot run.

    Raises:
        ConfigError: one sentence that names the setting and says what to change.
    """
    check_fields(optim, key)
    refuse(
        optim.schedule != "constant" and optim.total_steps is None,
        f"{key}.schedule={optim.schedule} decays until {key}.total_steps, which is null; set {key}.total_steps, for example "
        "to '${steps}'.",
    )
    refuse(
        optim.total_steps is not None and not optim.total_steps > optim.warmup_steps,
        f"{key}.total_steps={optim.total_steps} is out of range; it must be above {key}.warmup_steps={optim.warmup_steps}.",
    )
