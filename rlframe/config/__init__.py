"""Settings of the library: the algorithm, adapters, the optimiser and the base model; each beside its checks.

Settings of a job beside these are in `trainer.settings.config`.
"""

from __future__ import annotations

from rlframe.config.algorithm import AlgorithmConfig
from rlframe.config.lora import HEAD_MODULES, LoraConfig
from rlframe.config.model import MODEL_DTYPES, QUANTIZED, ModelConfig
from rlframe.config.optim import OptimConfig
from rlframe.config.validate import ConfigError

__all__ = [
    "HEAD_MODULES",
    "MODEL_DTYPES",
    "QUANTIZED",
    "AlgorithmConfig",
    "ConfigError",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
]
