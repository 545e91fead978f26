"""What pip's metadata of rlframe declares: distributions, the extras that bring them, and what is missing here.

Needs the standard library only: on an install without extras it is what says which one to add.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

MODULES = {"pyyaml": "yaml", "hydra-core": "hydra", "protobuf": "google"}
"""Distributions whose module has another name."""


@dataclass(frozen=True)
class Declared:
    """A line of the metadata."""

    name: str
    """Of the distribution."""
    line: str
    """As it is declared, without the extra."""
    versions: str
    """That fit."""
    extra: str | None
    """That brings it; None: every install has it."""


def declared() -> list[Declared]:
    """Every requirement of rlframe.

    Raises:
        PackageNotFoundError: rlframe itself is not installed.
    """
    found = []
    for text in requires("rlframe") or []:
        line, _, marker = text.partition(";")
        extra = re.search(r"extra\s*==\s*[\"']([^\"']+)", marker)
        parts = re.match(r"([\w.-]+)(\[.*?\])?\s*(.*)", line.strip())
        assert parts is not None
        found.append(Declared(parts[1], line.strip(), parts[3], extra[1] if extra else None))
    return found


def is_installed(name: str, installed: Callable[[str], str] = version) -> bool:
    """Whether there is a distribution of that name."""
    try:
        installed(name)
    except PackageNotFoundError:
        return False
    return True


def module_of(name: str) -> str:
    """The module that a distribution is imported as."""
    return MODULES.get(name.lower(), name.lower().replace("-", "_"))


def distribution_of(module: str) -> tuple[str, str] | None:
    """The declared distribution that would bring ``module``, and its extra; None where it is there, or another's."""
    top = module.partition(".")[0]
    try:
        for one in declared():
            if module_of(one.name) == top and one.extra and not is_installed(one.name):
                return one.name, one.extra
    except PackageNotFoundError:
        pass
    return None
