"""Objects of the user's own by import path, ``module:name``; the current directory is searched, too."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from rlframe.config import ConfigError


def load(key: str, path: str) -> Any:
    """What ``path`` names; ``key`` is the setting that has it, for the message.

    Raises:
        ConfigError: the module cannot be imported, or has no such name.
    """
    module, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # what is installed goes first
    try:
        found = import_module(module)
    except Exception as error:
        raise ConfigError(f"{key}={path} cannot be imported: {type(error).__name__}: {error}.") from error
    if not name or not hasattr(found, name):
        raise ConfigError(f"{key}={path} names nothing: {found.__file__} has no {name!r}.")
    return getattr(found, name)
