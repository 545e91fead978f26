"""An `AlgorithmConfig` as the functions that the policy loss applies: which token loss, which weights, which rejection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlframe.config import AlgorithmConfig
from rlframe.config.algorithm import check_algorithm
from rlframe.losses.base import PolicyTokenLoss
from rlframe.losses.cispo import cispo
from rlframe.losses.corrections import Rejection, WeightRule, rejection, truncation
from rlframe.losses.dis import dis
from rlframe.losses.ppo_clip import ppo_clip
from rlframe.losses.reinforce import reinforce

POLICY_LOSSES: dict[str, Callable[[AlgorithmConfig], PolicyTokenLoss]] = {
    "reinforce": reinforce,
    "dis": dis,
    "ppo_clip": ppo_clip,
    "cispo": cispo,
}
"""``algorithm.policy_loss`` -> what builds it; the one list of them."""


@dataclass(frozen=True)
class PolicyRules:
    """A point in the space of policy losses."""

    token_loss: PolicyTokenLoss
    sequence_weight: WeightRule | None
    """Rule of the one weight per trajectory; None without."""
    rejection: Rejection | None
    """What is dropped; None keeps everything."""
    centering: WeightRule | None
    """The token loss's own f, when scores are centred."""
    weighs: bool
    """Whether importance weights are applied, so that their statistics are worth logging."""

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> PolicyRules:
        """The rules that ``algorithm`` names.

        Raises:
            ConfigError: the combination is not defined.
        """
        check_algorithm(algorithm)
        token_loss = POLICY_LOSSES[algorithm.policy_loss](algorithm)
        return cls(
            token_loss=token_loss,
            sequence_weight=truncation(algorithm.rollout_is_threshold) if algorithm.rollout_is == "sequence" else None,
            rejection=rejection(algorithm.rollout_rs, algorithm.rollout_rs_threshold),
            centering=token_loss.centering if algorithm.score_centering else None,
            weighs=algorithm.rollout_is is not None or algorithm.policy_loss != "reinforce",
        )
