"""``rlframe settings``."""

from __future__ import annotations

import argparse

from trainer.cli.commands import show

HELP = "list the settings"
DESCRIPTION = "List settings, defaults and meanings."


def arguments(parser: argparse.ArgumentParser) -> None:
    """A section and ``--markdown``."""
    parser.add_argument("section", nargs="?", metavar="KEY", help="only this section, such as actor.optim")
    parser.add_argument("--markdown", action="store_true", help="tables for the documentation")


def run(arguments: argparse.Namespace) -> None:
    """Print the list."""
    from trainer.settings.reference import as_markdown, as_text

    show(as_markdown() if arguments.markdown else as_text(arguments.section))
