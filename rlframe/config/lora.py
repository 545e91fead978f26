"""Low-rank adapters: their settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

HEAD_MODULES = ("lm_head", "embed_out", "output_layer")
"""Names that architectures give to the output projection."""


@dataclass
class LoraConfig:
    """A low-rank adapter (PEFT)."""

    rank: int = 16
    """Rank of the factors."""
    alpha: float = 32.0
    """Scale: the adapter adds alpha / rank * B A."""
    targets: Any = "all-linear"
    """PEFT target modules: a list of names, a regular expression, or all-linear (every linear layer but the head)."""
    target_parameters: list[str] = field(default_factory=list)
    """PEFT target parameters, for weights that are not linear layers (``mlp.experts.gate_up_proj``); beside ``targets``."""
