"""Losses by name: those of ``algorithm.policy_loss``, and those of the HTTP API over the same formulas.

A new loss is a file in `rlframe.losses.token` or `rlframe.losses.sequence` and a line in `POLICY_LOSSES`; or, without touching
this repository, a class anywhere and ``algorithm.policy_loss=module:Class`` (`rlframe.losses.custom`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlframe.config import AlgorithmConfig, ConfigError
from rlframe.losses.base import SequenceLoss, TokenLoss
from rlframe.losses.custom import checked_loss
from rlframe.losses.sequence.gspo import GSPO
from rlframe.losses.token.cispo import CISPO
from rlframe.losses.token.dis import DIS
from rlframe.losses.token.dro import DRO
from rlframe.losses.token.importance_sampling import ImportanceSampling
from rlframe.losses.token.ppo_clip import PPOClip
from rlframe.losses.token.reinforce import Reinforce
from rlframe.plugins import load

POLICY_LOSSES: dict[str, Callable[..., Any]] = {
    "reinforce": Reinforce,
    "dis": DIS,
    "ppo_clip": PPOClip,
    "cispo": CISPO,
    "gspo": GSPO,
    "importance_sampling": ImportanceSampling,
    "dro": DRO,
}
"""``algorithm.policy_loss`` -> the class. One with a classmethod ``of(algorithm)`` is built by it, from the settings of
`AlgorithmConfig` that its ``settings`` names; any other by its constructor, from ``algorithm.loss_args``."""


def make_policy_loss(algorithm: AlgorithmConfig) -> TokenLoss | SequenceLoss:
    """The loss that ``algorithm.policy_loss`` names, with its settings.

    Raises:
        ConfigError: there is no such loss, ``algorithm.loss_args`` does not fit it, or one of the user's own cannot be used.
    """
    name = algorithm.policy_loss
    loss = _built(_maker(name), algorithm)
    return loss if name in POLICY_LOSSES else checked_loss(loss, name)


def unused_settings(policy_loss: str) -> list[str]:
    """Fields of `AlgorithmConfig` that other losses read and this one does not.

    Raises:
        ConfigError: there is no such loss.
    """
    read = getattr(_maker(policy_loss), "settings", ())
    others = {name: None for make in POLICY_LOSSES.values() for name in getattr(make, "settings", ())}
    return [name for name in others if name not in read]


def centred_losses() -> list[str]:
    """Names of the built-in losses whose scores can be centred."""
    made = {name: _built(make, AlgorithmConfig(policy_loss=name)) for name, make in POLICY_LOSSES.items()}
    return [name for name, loss in made.items() if loss.centering is not None]


def _maker(name: str) -> Callable[..., Any]:
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    if ":" in name:
        found: Callable[..., Any] = load("algorithm.policy_loss", name)
        return found
    raise ConfigError(
        f"algorithm.policy_loss={name} is not known; choose one of {', '.join(POLICY_LOSSES)}, or module:Class of your own."
    )


def _built(make: Callable[..., Any], algorithm: AlgorithmConfig) -> Any:
    of, args = getattr(make, "of", None), algorithm.loss_args
    taken = list(inspect.signature(of or make).parameters)[1 if of else 0 :]
    name = f"algorithm.policy_loss={algorithm.policy_loss}"
    if unknown := [key for key in args if key not in taken]:
        raise ConfigError(f"algorithm.loss_args has {unknown[0]}, which {name} does not take; it takes {_listed(taken)}.")
    try:
        return of(algorithm, **args) if of else make(**args)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{name} cannot be made from algorithm.loss_args={dict(args)}: {error}.") from error


def _listed(names: Any) -> str:
    return ", ".join(names) or "no settings of its own"


@dataclass(frozen=True)
class LossKind:
    """What a loss of the HTTP API takes."""

    needs: str
    """``lm_head`` or ``value_head``."""
    required: tuple[str, ...]
    """Inputs of every datum."""
    optional: tuple[str, ...] = ()
    """Inputs that may be left out."""
    config: Mapping[str, float] = field(default_factory=dict)
    """Settings with their defaults; NaN: off."""
    trains: bool = True
    """False: for forward passes only."""
    make: Callable[..., TokenLoss] | None = None
    """Builds the formula of a loss on tokens from the settings."""
    advantages: str = "advantages"
    """The input that the formula takes as A."""


def _within(make: Callable[[float, float], TokenLoss]) -> Callable[..., TokenLoss]:
    """The API's thresholds are absolute, as the formulas' are."""
    return lambda clip_low_threshold, clip_high_threshold: make(clip_low_threshold, clip_high_threshold)


def _thresholds(low: float, high: float) -> dict[str, float]:
    return {"clip_low_threshold": low, "clip_high_threshold": high}


_POLICY = ("target_tokens", "logprobs", "advantages")

API_LOSSES: dict[str, LossKind] = {
    "cross_entropy": LossKind("lm_head", ("target_tokens",), ("weights",), make=Reinforce, advantages="weights"),
    "importance_sampling": LossKind("lm_head", _POLICY, ("weights",), make=ImportanceSampling),
    "ppo": LossKind("lm_head", _POLICY, ("weights",), _thresholds(0.8, 1.2), make=_within(PPOClip)),
    "cispo": LossKind("lm_head", _POLICY, ("weights",), _thresholds(0.0, 4.0), make=_within(CISPO)),
    "dis": LossKind("lm_head", _POLICY, ("weights",), _thresholds(0.7, 6.0), make=_within(DIS)),
    "dro": LossKind("lm_head", _POLICY, ("weights",), {"beta": 0.05}, make=DRO),
    "value_loss": LossKind(
        "value_head", ("returns",), ("weights", "old_values", *_POLICY), {"vf_coef": 1.0, "clip_range": float("nan")}
    ),
    "value_prediction": LossKind("value_head", (), ("weights", "returns", "old_values", *_POLICY), trains=False),
}
"""Loss names of the API; `rlframe.losses.targets` lays them out over positions."""
