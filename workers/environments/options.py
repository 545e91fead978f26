"""Reading ``task.options`` into an environment's own dataclass, with a suggestion for mistyped names."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from rlframe.config import ConfigError
from rlframe.config.validate import nearest

T = TypeVar("T")


def read_options(kind: type[T], options: dict[str, Any], environment: str) -> T:
    """``kind(**options)``.

    Raises:
        ConfigError: a name that ``kind`` does not have; names the nearest one.
    """
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near}?" if near else f"the environment {environment} takes no options."
            raise ConfigError(f"task.options.{name} is not an option of the environment {environment}; {hint}")
    return kind(**options)
