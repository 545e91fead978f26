"""Estimators by name. A new one is a file here and a line below, or a custom ``module:Class``."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

from rlframe.advantages.base import Estimator
from rlframe.advantages.gae import GAE
from rlframe.advantages.group import Group
from rlframe.advantages.none import NoBaseline
from rlframe.advantages.running_mean import RunningMean
from rlframe.config import AlgorithmConfig, ConfigError
from rlframe.plugins import load

ESTIMATORS: dict[str, Callable[..., Estimator]] = {
    "gae": GAE,
    "running_mean": RunningMean,
    "group": Group,
    "none": NoBaseline,
}
"""Names of ``algorithm.advantage``."""

_KEY = "algorithm.advantage"


def make_estimator(algorithm: AlgorithmConfig) -> Estimator:
    """The estimator ``algorithm.advantage``, one of `ESTIMATORS` or ``module:Class``, with ``algorithm.advantage_args``.

    Raises:
        ConfigError: the name is unknown, it does not take these arguments, or it does not fit `Estimator`.
    """
    name, args = algorithm.advantage, algorithm.advantage_args
    if name not in ESTIMATORS and ":" not in name:
        raise ConfigError(f"{_KEY}={name} is not known; choose one of {', '.join(ESTIMATORS)}, or module:Class of your own.")
    build = ESTIMATORS[name] if name in ESTIMATORS else load(_KEY, name)
    if not callable(build):
        raise ConfigError(f"{_KEY}={name} is not a class, so no estimator can be built from it.")
    try:
        inspect.signature(build).bind(algorithm, **args)
    except TypeError as error:
        raise ConfigError(
            f"{_KEY}={name} cannot be built with algorithm.advantage_args={args}: {error}; it is called as "
            f"{build.__name__}(algorithm, **advantage_args)."
        ) from None
    estimator = build(algorithm, **args)
    _check_fit(name, estimator)
    return estimator


def check_advantage(algorithm: AlgorithmConfig) -> None:
    """Refuse an unknown estimator, and settings that do not fit it.

    Raises:
        ConfigError: one sentence that names the setting and says what to change.
    """
    estimator = make_estimator(algorithm)
    estimator.check()
    normalizing = [name for name, each in ESTIMATORS.items() if "normalize_advantages" in getattr(each, "settings", ())]
    if algorithm.normalize_advantages and "normalize_advantages" not in estimator.settings:
        raise ConfigError(
            f"algorithm.normalize_advantages=true has no effect with algorithm.advantage={algorithm.advantage}; set "
            f"algorithm.normalize_advantages=false or algorithm.advantage={' or '.join(normalizing)}."
        )


def _check_fit(name: str, estimator: Any) -> None:
    """Refuse an object that does not implement `Estimator`."""
    is_class = "it is a class instead of an object" if isinstance(estimator, type) else None
    calls = ("__call__", "check", "state_dict", "load_state_dict")
    missing = next((f"it has no method {call}" for call in calls if not callable(getattr(estimator, call, None))), None)
    flag = getattr(estimator, "needs_critic", None)
    unsaid = None if isinstance(flag, bool) else f"its needs_critic is {flag!r} instead of True or False"
    settings = getattr(estimator, "settings", None)
    listed = isinstance(settings, list | tuple) and all(hasattr(AlgorithmConfig(), str(each)) for each in settings)
    unlisted = None if listed else f"its settings are {settings!r} instead of a tuple of fields of algorithm"
    fault = is_class or missing or unsaid or unlisted or _unsaveable(estimator)
    if fault:
        raise ConfigError(f"{_KEY}={name} is not an advantage estimator: {fault}; subclass rlframe.advantages.Estimator.")


def _unsaveable(estimator: Estimator) -> str | None:
    try:
        json.dumps(estimator.state_dict())
    except TypeError as error:
        return f"its state_dict cannot be written as JSON ({error})"
    return None


def unused_settings(estimator: Estimator) -> list[str]:
    """Fields of ``algorithm`` that other estimators read and this one does not."""
    others = {name: None for each in ESTIMATORS.values() for name in getattr(each, "settings", ())}
    return [name for name in others if name not in estimator.settings]
