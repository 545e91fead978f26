"""The optimiser: its settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional


@dataclass
class OptimConfig:
    """AdamW with a schedule and a gradient clip."""

    lr: float = 1e-6
    """Learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Adam's decay rates."""
    eps: float = 1e-8
    """Adam's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Optional[float] = 1.0
    """Clip of the global gradient norm; null: none."""
    schedule: str = "constant"
    """``constant``, ``linear`` or ``cosine`` after the warm-up."""
    warmup_steps: int = 0
    """Optimiser steps of linear warm-up."""
    total_steps: Optional[int] = None
    """Optimiser steps after which a decaying schedule ends."""
    min_lr_ratio: float = 0.0
    """Fraction of lr that a decaying schedule ends at."""
