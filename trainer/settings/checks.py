"""Which jobs make sense: the checks of the library's settings, of the task and of the engine, in this order."""

from __future__ import annotations

from rlframe.config import Config
from rlframe.config import checks as library
from workers.engines.checks import check_engine
from workers.environments.settings import check_task


def check(config: Config) -> None:
    """Refuse what is out of range or not defined; needs neither Ray nor an engine, and knows nothing of the machine.

    Raises:
        ConfigError: one sentence that names the setting, or the two settings that do not go together, and what to change.
    """
    for part in (library.check, check_task, check_engine):
        part(config)
