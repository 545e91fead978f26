"""The base model: its settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

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
    dtype: str = "float32"
    """``float32`` or ``bfloat16``, of the trainer's forward and backward; master weights and optimiser are always float32."""
    attn_implementation: str = "sdpa"
    """Attention kernel of transformers."""
    trust_remote_code: bool = False
    """Run code that a model folder ships."""
