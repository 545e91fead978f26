"""``rlframe metrics``."""

from __future__ import annotations

import argparse

from trainer.cli.commands import show

HELP = "list the metrics"
DESCRIPTION = "List the names in metrics.jsonl with their meanings; of a part of them, also what to do when they look bad."


def arguments(parser: argparse.ArgumentParser) -> None:
    """A part of a name and ``--markdown``."""
    parser.add_argument("part", nargs="?", metavar="NAME", help="only names with this in them, such as critic/")
    parser.add_argument("--markdown", action="store_true", help="tables for the documentation")


def run(arguments: argparse.Namespace) -> None:
    """Print the list."""
    from trainer.watch.glossary import as_markdown, as_text

    show(as_markdown() if arguments.markdown else as_text(arguments.part))
