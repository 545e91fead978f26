"""``rlframe presets``."""

from __future__ import annotations

import argparse

from trainer.cli.commands import show

HELP = "list the algorithms"
DESCRIPTION = "List the presets of algorithm=..."


def arguments(parser: argparse.ArgumentParser) -> None:
    """``--markdown``."""
    parser.add_argument("--markdown", action="store_true", help="a table for the documentation")


def run(arguments: argparse.Namespace) -> None:
    """Print the list."""
    from trainer.settings.presets import as_markdown, as_text

    show(as_markdown() if arguments.markdown else as_text())
