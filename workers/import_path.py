"""What a user names by ``module:name`` instead of a name of ours: an engine, an environment."""

from __future__ import annotations

import importlib
import os
from typing import Any

from rlframe.config import ConfigError
from workers.process import find_modules_in


def imported(setting: str, path: str) -> Any:
    """The object ``module:name``, of a module that is installed or lies in the current directory.

    Args:
        setting: where the path was given, for messages.
        path: ``module:name``.

    Raises:
        ConfigError: the module cannot be imported, or has no such name.
    """
    module, _, name = path.partition(":")
    find_modules_in(os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: nothing before the colon
        raise ConfigError(f"{setting}={path} cannot be imported: {error}.") from error
