"""The algorithm: its settings; which combinations of them are defined is in `rlframe.losses.checks`, which needs torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from rlframe.config.validate import ConfigError, above, at_least, between, choice, rule

ROLLOUT_IS = ("token", "sequence")


@dataclass
class AlgorithmConfig:
    """A point in the space of algorithms; a preset is a named point."""

    description: str = ""
    """One line for ``rlframe presets``."""
    policy_loss: str = "reinforce"
    """Name of a loss, such as reinforce, dis or ppo_clip (docs/algorithms.md has all); or ``module:Class`` of your own (the
    current directory is searched, too)."""
    loss_args: dict[str, Any] = field(default_factory=dict)
    """Settings of the loss that are no fields here, by the names of its constructor; of dro: ``beta`` (0.05)."""
    clip_low: float = field(default=0.2, metadata=at_least(0))
    """Lower clip: the ratio band of losses that have one (dis, ppo_clip, ...) starts at 1 - clip_low."""
    clip_high: float = field(default=0.2, metadata=at_least(0))
    """Upper clip: the ratio band ends at 1 + clip_high."""
    clip_dual: Optional[float] = None
    """ppo_clip: with a negative advantage the ratio counts at most this much (dual clip; above 1); null: no bound."""
    rollout_is: Optional[str] = field(default=None, metadata=choice(ROLLOUT_IS, optional=True))
    """Importance weight of trainer against sampler: null, ``token`` or ``sequence``."""
    rollout_is_threshold: Any = 2.0
    """A number c (truncate at c) or a band ``[lo, hi]`` (zero outside of it)."""
    rollout_rs: Optional[str] = None
    """Rejection: ``token_k1``.. ``seq_max_k3``, or null."""
    rollout_rs_threshold: Any = None
    """A number (upper bound; k1: the ratio band 1/c to c) or, for k1, a band ``[lo, hi]``."""
    score_centering: bool = False
    """Subtract the sampler's expected score from every score; needs heads from the rollout workers."""
    advantage: str = "gae"
    """Name of an estimator, such as gae (which has a critic) or group (docs/algorithms.md has all); or ``module:Class`` of
    your own (the current directory is searched, too)."""
    advantage_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of an estimator of your own."""
    rollouts_per_prompt: int = field(default=1, metadata=at_least(1))
    """Rollouts of one prompt; above 1 for ``group``."""
    normalize_advantages: bool = False
    """``group``: divide by the standard deviation of the group."""
    running_mean_decay: float = field(default=0.95, metadata=rule(lambda v: 0 <= v < 1, "at least 0 and below 1"))
    """``running_mean``: weight of the past at every step."""
    gamma: float = field(default=1.0, metadata=between(0, 1))
    """Discount per action token."""
    lambda_critic: float = field(default=1.0, metadata=between(0, 1))
    """GAE lambda of the critic's targets."""
    lambda_policy: Any = field(
        default="adaptive",
        metadata=rule(lambda v: v == "adaptive" or 0 <= v <= 1, "between 0 and 1, or adaptive"),
    )
    """GAE lambda of the policy's advantages: a number, or ``adaptive`` for 1 - 1 / (lambda_alpha * length)."""
    lambda_alpha: float = field(default=1.5, metadata=above(0))
    """alpha of the adaptive lambda."""

    def __post_init__(self) -> None:
        """Bands that were written ``"lo_hi"`` are lists from here on."""
        self.rollout_is_threshold = band(self.rollout_is_threshold)
        self.rollout_rs_threshold = band(self.rollout_rs_threshold)


def band(value: Any) -> Any:
    """A band as it was written before, ``"lo_hi"``, as the list ``[lo, hi]``; anything else as it is."""
    try:
        bounds = [float(part) for part in value.split("_")] if isinstance(value, str) else []
    except ValueError:
        bounds = []
    return bounds if len(bounds) == 2 else value


def parse_threshold(value: Any, key: str) -> tuple[float | None, float]:
    """``c`` -> (None, c), ``[lo, hi]`` -> (lo, hi).

    Raises:
        ConfigError: neither a positive number nor two of them, lower first.
    """
    value = band(value)
    parts = value if isinstance(value, list | tuple) else [value]
    try:
        bounds = [float(part) for part in parts if "_" not in str(part)]  # Python reads "1_2" as the number 12
    except (TypeError, ValueError):
        bounds = []
    good = len(bounds) == len(parts) in (1, 2) and all(0 <= bound < float("inf") for bound in bounds) and bounds[-1] > 0
    if not good or (len(bounds) == 2 and bounds[0] >= bounds[1]):
        raise ConfigError(f"{key}={value} is not a threshold; write a positive number (2.0) or a band [lo, hi] ([0.5, 5.0]).")
    return (bounds[0] if len(bounds) == 2 else None), bounds[-1]
