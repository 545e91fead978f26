"""The commands of ``rlframe``, one module each; `trainer.cli.main` has the table. Nothing heavy is imported here.

A command module has HELP (a line for ``rlframe --help``), DESCRIPTION, ``arguments`` and ``run``; heavy imports happen inside
``run``, so that help is immediate.
"""

from __future__ import annotations

import argparse
import signal
from typing import Protocol

OVERRIDES = "settings, such as algorithm=sao actor.optim.lr=1e-5 (docs/configuration.md)"
ADDRESS = "dashboard of the cluster, http://HEAD:8265; without it, that of RAY_API_SERVER_ADDRESS"


class Command(Protocol):
    """What a command module offers."""

    HELP: str
    DESCRIPTION: str

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare what the command takes on its command line."""

    def run(self, arguments: argparse.Namespace) -> int | None:
        """Run the command; returns the exit code (None: 0).

        Raises:
            ConfigError: the request is refused; the message is one sentence.
        """


def show(text: str) -> None:
    """Print a list that a user may pipe into ``head``: ending early is no error."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(text)
