"""The configuration of a job: the schema, and which configurations make sense (`rlframe.config.checks`)."""

from __future__ import annotations

from rlframe.config.schema import (
    ENGINE_DTYPES,
    HELD_OUT,
    MODEL_DTYPES,
    ActorConfig,
    AlgorithmConfig,
    CheckpointConfig,
    ClusterConfig,
    Config,
    ConfigError,
    CriticConfig,
    EvalConfig,
    LogConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    ServerConfig,
    TaskConfig,
    critic_names,
    serves_other_weights,
)

__all__ = [
    "ENGINE_DTYPES",
    "HELD_OUT",
    "MODEL_DTYPES",
    "ActorConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "ConfigError",
    "CriticConfig",
    "EvalConfig",
    "LogConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "RolloutConfig",
    "ServerConfig",
    "TaskConfig",
    "critic_names",
    "serves_other_weights",
]
