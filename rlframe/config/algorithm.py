"""The algorithm: its settings, and which combinations of them are defined."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from rlframe.config.validate import ConfigError, above, at_least, between, check_fields, choice, one_of, refuse, rule

ROLLOUT_IS = ("token", "sequence")


@dataclass
class AlgorithmConfig:
    """A point in the space of algorithms; a preset is a named point."""

    description: str = ""
    """One line for ``rlframe presets``."""
    policy_loss: str = "reinforce"
    """``reinforce``, ``dis``, ``ppo_clip`` or ``cispo``."""
    clip_low: float = field(default=0.2, metadata=at_least(0))
    """Lower clip: the ratio band of dis, ppo_clip and cispo starts at 1 - clip_low."""
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
    """``gae`` (critic), ``running_mean``, ``group`` or ``none``; or ``module:Class`` of your own (the current directory is
    searched, too)."""
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


def check_algorithm(a: AlgorithmConfig) -> None:
    """Refuse a policy loss, correction or combination of them that is not defined; for those who use the losses alone.

    Raises:
        ConfigError: one sentence, as `check` would say it.
    """
    from rlframe.losses.rules import POLICY_LOSSES  # needs torch, and this function

    check_fields(a, "algorithm")
    one_of("algorithm.policy_loss", a.policy_loss, POLICY_LOSSES)
    _correction(a)
    if a.score_centering:
        on, off = "algorithm.score_centering=true", "set algorithm.score_centering=false"
        centred = [name for name, make in POLICY_LOSSES.items() if make(a).centering is not None]
        refuse(
            a.policy_loss not in centred,
            f"{on} needs a weight that depends on a token's ratio alone and algorithm.policy_loss={a.policy_loss} has none; "
            f"choose algorithm.policy_loss={', '.join(centred)}, or {off}.",
        )
        refuse(
            a.rollout_is == "sequence",
            f"{on} needs one weight per token and algorithm.rollout_is=sequence gives one per sequence; "
            f"set algorithm.rollout_is=token or null, or {off}.",
        )


def _correction(a: AlgorithmConfig) -> None:
    refuse(
        a.rollout_is is not None and a.policy_loss != "reinforce",
        f"algorithm.rollout_is={a.rollout_is} would apply the ratio twice with algorithm.policy_loss={a.policy_loss}, "
        "whose loss already has it; set algorithm.rollout_is=null or algorithm.policy_loss=reinforce.",
    )
    refuse(
        a.policy_loss == "dis" and a.clip_low >= 1,
        f"algorithm.clip_low={a.clip_low} makes the lower end of the ratio band 0 or less with algorithm.policy_loss=dis; "
        "it must be below 1.",
    )
    refuse(
        a.policy_loss in ("ppo_clip", "cispo") and a.clip_low > 1,
        f"algorithm.clip_low={a.clip_low} makes the lower end of the ratio band negative with "
        f"algorithm.policy_loss={a.policy_loss}; it must be at most 1.",
    )
    refuse(
        a.clip_dual is not None and not a.clip_dual > 1,
        f"algorithm.clip_dual={a.clip_dual} is out of range; it must be above 1, or null.",
    )
    refuse(
        a.rollout_rs is None and a.rollout_rs_threshold is not None,
        f"algorithm.rollout_rs_threshold={a.rollout_rs_threshold} has no rule to bound with algorithm.rollout_rs=null; "
        "choose a rule or set algorithm.rollout_rs_threshold=null.",
    )
    parse_threshold(a.rollout_is_threshold, "algorithm.rollout_is_threshold")
    refuse(
        a.rollout_rs is not None and a.rollout_rs_threshold is None,
        f"algorithm.rollout_rs={a.rollout_rs} needs a bound and algorithm.rollout_rs_threshold is null; "
        "set algorithm.rollout_rs_threshold, such as [0.999, 1.001].",
    )
    from rlframe.losses.corrections import rejection  # needs torch, and this module's parse_threshold

    rejection(a.rollout_rs, a.rollout_rs_threshold)
