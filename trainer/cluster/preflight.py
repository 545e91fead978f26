"""Checks of this machine before a command starts Ray; `trainer.run.job` checks the data.

``rlframe submit`` skips them: the job runs on another machine, where ``rlframe train`` makes them.
"""

from __future__ import annotations

import os

from trainer.cluster.folders import check_temporary_folder
from trainer.cluster.placement import cluster_address
from trainer.settings.config import Config
from workers.engines.checks import check_arguments, check_installed
from workers.process import refuse_shadowing


def check_machine(config: Config) -> None:
    """Refuse what cannot work on this machine, before a model is built.

    Raises:
        ConfigError: a module of the user hides one of ours, the engine is not installed or does not take
            ``rollout.engine_args``, or a local Ray head could not work in the temporary folder.
    """
    refuse_shadowing(os.getcwd())
    if config.cluster.address is None:
        check_installed(config.rollout)
    if cluster_address(config) is None:
        check_temporary_folder()
    check_arguments(config.rollout)
