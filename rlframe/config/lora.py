"""Low-rank adapters: their settings and their check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlframe.config.validate import at_least, check_fields, refuse

HEAD_MODULES = ("lm_head", "embed_out", "output_layer")
"""Names that architectures give to the output projection."""


@dataclass
class LoraConfig:
    """A low-rank adapter (PEFT)."""

    rank: int = field(default=16, metadata=at_least(1))
    """Rank of the factors."""
    alpha: float = 32.0
    """Scale: the adapter adds alpha / rank * B A."""
    targets: Any = "all-linear"
    """PEFT target modules: a list of names, a regular expression, or all-linear (every linear layer but the head)."""
    target_parameters: list[str] = field(default_factory=list)
    """PEFT target parameters, for weights that are not linear layers (``mlp.experts.gate_up_proj``); beside ``targets``."""


def check_lora(lora: LoraConfig, key: str = "lora", value_head: bool = False) -> None:
    """Refuse a rank below 1 and targets that name no module.

    Args:
        lora: the settings.
        key: where they stand in the configuration.
        value_head: the model has a value head in place of the output projection, which cannot be a target then.

    Raises:
        ConfigError: one sentence that names the setting and says what to change.
    """
    check_fields(lora, key)
    if not lora.targets and lora.target_parameters:
        return
    key, targets = f"{key}.targets", lora.targets
    listed = isinstance(targets, list) and all(isinstance(name, str) and name for name in targets)
    refuse(
        not (listed or isinstance(targets, str)) or not targets,
        f"{key}={targets} names no module; write all-linear, a regular expression or a list such as [q_proj,v_proj].",
    )
    heads = [name for name in HEAD_MODULES if name in (targets if listed else [targets])]
    refuse(
        value_head and bool(heads),
        f"{key} names {''.join(heads)}, but the critic has a value head in its place; leave it out.",
    )
