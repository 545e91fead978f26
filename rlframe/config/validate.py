"""What every check of a setting is made of, and the error that it raises."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

SEEDS = 2**32
"""Seeds are below this, which Python, numpy, torch and the engines all take."""


class ConfigError(ValueError):
    """A setting, or a pair of settings, that is refused; the message is one sentence for the user."""


def refuse(condition: bool, sentence: str) -> None:
    """Raise `ConfigError` with ``sentence`` where ``condition`` holds."""
    if condition:
        raise ConfigError(sentence)


def one_of(key: str, value: Any, allowed: Collection[str], optional: bool = False) -> None:
    """Refuse a name that is not in ``allowed``; ``optional``: None is allowed, too."""
    listed = ", ".join([*allowed, *(["null"] if optional else [])])
    refuse(value not in allowed and not (optional and value is None), f"{key}={value} is not known; choose one of {listed}.")
