"""rlframe: reinforcement learning of language models from single, asynchronous rollouts.

The library for other trainers is what this module exports: losses, corrections, score centering, advantages and metrics, with
torch and numpy as the only dependencies. Names are imported when they are first used, so that ``import rlframe`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rlframe.advantages import (
        Estimator,
        adaptive_lambda,
        compute_advantages,
        group_advantages,
        make_estimator,
        skip_observation_gae,
    )
    from rlframe.config import AlgorithmConfig, ConfigError, LoraConfig, ModelConfig, OptimConfig
    from rlframe.losses.base import LMHead, Loss, LossInputs, LossOutputs, SequenceLoss, TokenLoss, TokenTerms
    from rlframe.losses.corrections import Band, Clamp, Rejection, Truncate, Unweighted, WeightRule, rejection, truncation
    from rlframe.losses.functional import PolicyLossOutputs, policy_loss, value_loss
    from rlframe.losses.logprobs import LogProbs
    from rlframe.losses.policy import PolicyLoss
    from rlframe.losses.score_centering import Centering, center
    from rlframe.losses.sequences import Sequences
    from rlframe.losses.value import ValueLoss, ValuePrediction
    from rlframe.metrics import Metrics
    from rlframe.types import Batch, Prompt, Trajectory
    from rlframe.validation import check_batch

_MODULES = {
    "rlframe.advantages": "Estimator adaptive_lambda compute_advantages group_advantages make_estimator skip_observation_gae",
    "rlframe.config": "AlgorithmConfig ConfigError LoraConfig ModelConfig OptimConfig",
    "rlframe.losses.corrections": "Band Clamp Rejection Truncate Unweighted WeightRule rejection truncation",
    "rlframe.losses.base": "LMHead Loss LossInputs LossOutputs SequenceLoss TokenLoss TokenTerms",
    "rlframe.losses.functional": "PolicyLossOutputs policy_loss value_loss",
    "rlframe.losses.logprobs": "LogProbs",
    "rlframe.losses.policy": "PolicyLoss",
    "rlframe.losses.value": "ValueLoss ValuePrediction",
    "rlframe.metrics": "Metrics",
    "rlframe.losses.score_centering": "Centering center",
    "rlframe.losses.sequences": "Sequences",
    "rlframe.types": "Batch Prompt Trajectory",
    "rlframe.validation": "check_batch",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "AlgorithmConfig",
    "Band",
    "Batch",
    "Centering",
    "Clamp",
    "ConfigError",
    "Estimator",
    "LMHead",
    "LogProbs",
    "LoraConfig",
    "Loss",
    "LossInputs",
    "LossOutputs",
    "Metrics",
    "ModelConfig",
    "OptimConfig",
    "PolicyLoss",
    "PolicyLossOutputs",
    "Prompt",
    "Rejection",
    "SequenceLoss",
    "Sequences",
    "TokenLoss",
    "TokenTerms",
    "Trajectory",
    "Truncate",
    "Unweighted",
    "ValueLoss",
    "ValuePrediction",
    "WeightRule",
    "adaptive_lambda",
    "center",
    "check_batch",
    "compute_advantages",
    "group_advantages",
    "make_estimator",
    "policy_loss",
    "rejection",
    "skip_observation_gae",
    "truncation",
    "value_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rlframe' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
