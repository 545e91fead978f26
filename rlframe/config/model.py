"""The base model: its settings and their check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from rlframe.config.validate import check_fields, choice, refuse

MODEL_DTYPES = ("float32", "bfloat16")
"""What the trainer computes in; float16 would need loss scaling."""
QUANTIZED = ("int8", "int4", "int3", "fp8")
"""Formats that weights can be rounded to (`rlframe.quantize`)."""


@dataclass
class ModelConfig:
    """The base model that every role starts from."""

    name: str = "tiny"
    """What it is called in logs."""
    builder: Optional[str] = None
    """``tiny`` or ``smollm2``: made (or unpacked) once into the cache; null: ``path`` is used as it is."""
    path: Optional[str] = None
    """A local Hugging Face folder (weights, config, tokenizer)."""
    build: dict[str, Any] = field(default_factory=dict)
    """Arguments of the builder."""
    dtype: str = field(default="float32", metadata=choice(MODEL_DTYPES))
    """``float32`` or ``bfloat16``, of the trainer's forward and backward; master weights and optimiser are always float32."""
    attn_implementation: str = "sdpa"
    """Attention kernel of transformers."""
    trust_remote_code: bool = False
    """Run code that a model folder ships."""


def check_model(model: ModelConfig, key: str = "model") -> None:
    """Refuse a model that comes from nowhere or from two places, and a dtype that the trainer does not compute in.

    Raises:
        ConfigError: one sentence that names the setting and says what to change.
    """
    check_fields(model, key)
    refuse(
        model.path is not None and model.builder is not None,
        f"{key}.path and {key}.builder={model.builder} are both set; choose model=local for a folder of your own.",
    )
    refuse(
        model.path is None and model.builder is None,
        f"{key}.path is not set and {key}.builder is null; set {key}.path to a local Hugging Face folder or choose model=tiny.",
    )
