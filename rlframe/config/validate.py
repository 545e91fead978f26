"""What checks of settings are made of: the rule beside a field, `refuse`, and the error that every check raises.

    workers: int = field(default=1, metadata=at_least(1))

A section's check calls `check_fields` on it; ``docs/settings.md`` shows the rule, too.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields
from typing import Any


class ConfigError(ValueError):
    """A setting, or a pair of settings, that is refused; the message is one sentence for the user."""


@dataclass(frozen=True)
class Rule:
    """Which values a field may have."""

    holds: Callable[[Any], bool]
    wanted: str
    """In words, to complete ``refusal``."""
    refusal: str = "is out of range; it must be"

    def check(self, key: str, value: Any) -> None:
        """Refuse ``value`` of the setting ``key`` where the rule does not hold.

        Raises:
            ConfigError: one sentence that names the setting and says which values there are.
        """
        try:
            good = self.holds(value)
        except TypeError:
            good = False
        refuse(not good, f"{key}={value} {self.refusal} {self.wanted}.")


def rule(holds: Callable[[Any], bool], wanted: str, optional: bool = False) -> dict[str, Rule]:
    """Metadata of a field; ``wanted`` completes "it must be ...", and ``optional`` lets None pass."""
    if optional:
        return {"rule": Rule(lambda value: value is None or holds(value), f"{wanted}, or null")}
    return {"rule": Rule(holds, wanted)}


def at_least(low: float, optional: bool = False) -> dict[str, Rule]:
    """Metadata of a field that is a number from ``low`` on; not NaN."""
    return rule(lambda value: value >= low, f"at least {low:g}", optional)


def above(low: float, optional: bool = False) -> dict[str, Rule]:
    """Metadata of a field that is a number greater than ``low``; not NaN."""
    return rule(lambda value: value > low, f"above {low:g}", optional)


def between(low: float, high: float) -> dict[str, Rule]:
    """Metadata of a field that is a number from ``low`` to ``high``, both included."""
    return rule(lambda value: low <= value <= high, f"between {low:g} and {high:g}")


def choice(allowed: Collection[str], optional: bool = False) -> dict[str, Rule]:
    """Metadata of a field that is one of these names; ``optional``: or None."""
    listed = ", ".join([*allowed, *(["null"] if optional else [])])
    return {"rule": Rule(lambda v: v in allowed or (optional and v is None), listed, "is not known; choose one of")}


def check_fields(section: Any, key: str = "") -> None:
    """Refuse a value of a dataclass that breaks the rule beside its field; sections inside it are not looked at.

    Args:
        section: an instance of the dataclass.
        key: where it stands in the configuration, such as ``actor.optim``; "" at the root.

    Raises:
        ConfigError: one sentence, of the first such field.
    """
    for field in fields(section):
        if "rule" in field.metadata:
            field.metadata["rule"].check(f"{key}.{field.name}".lstrip("."), getattr(section, field.name))


def refuse(condition: bool, sentence: str) -> None:
    """Raise `ConfigError` with ``sentence`` where ``condition`` holds."""
    if condition:
        raise ConfigError(sentence)


def one_of(key: str, value: Any, allowed: Collection[str], optional: bool = False) -> None:
    """Refuse a name that is not in ``allowed``; for names that are not known where the field is declared."""
    choice(allowed, optional)["rule"].check(key, value)


def nearest(word: Any, known: Iterable[str], cutoff: float = 0.0) -> str | None:
    """The name most like ``word``, to complete "did you mean ...?"; None where none is as alike as ``cutoff`` (0 to 1)."""
    return next(iter(difflib.get_close_matches(str(word), list(known), n=1, cutoff=cutoff)), None)
