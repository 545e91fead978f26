"""``rlframe serve``."""

from __future__ import annotations

import argparse

HELP = "serve the API of the tinker SDK"
DESCRIPTION = "Serve training sessions and samplers over HTTP (docs/server.md)."


def arguments(parser: argparse.ArgumentParser) -> None:
    """Overrides."""
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings, such as model=smollm2 server.port=8000")


def run(arguments: argparse.Namespace) -> None:
    """Compose the configuration and serve."""
    from trainer.server.serve import serve
    from trainer.settings.compose import compose

    serve(compose(arguments.overrides))
