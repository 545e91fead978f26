"""Which algorithms are defined: a policy loss, its corrections, and what does not go together."""

from __future__ import annotations

from rlframe.config import AlgorithmConfig
from rlframe.config.algorithm import parse_threshold
from rlframe.config.validate import check_fields, refuse
from rlframe.losses.corrections import rejection
from rlframe.losses.registry import centred_losses, make_policy_loss


def check_algorithm(a: AlgorithmConfig) -> None:
    """Refuse a policy loss, correction or combination of them that is not defined; for those who use the losses alone.

    Raises:
        ConfigError: one sentence that names the setting, or the two settings that do not go together, and what to change.
    """
    check_fields(a, "algorithm")
    loss = make_policy_loss(a)
    _correction(a)
    if a.score_centering:
        on, off = "algorithm.score_centering=true", "set algorithm.score_centering=false"
        has = "weighs a token by its whole trajectory" if loss.level == "sequence" else "has none"
        refuse(
            loss.centering is None,
            f"{on} needs a weight that depends on a token's ratio alone and algorithm.policy_loss={a.policy_loss} {has}; "
            f"choose algorithm.policy_loss={', '.join(centred_losses())}, or {off}.",
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
    rejection(a.rollout_rs, a.rollout_rs_threshold)
