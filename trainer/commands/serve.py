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
    from rlframe.config import ConfigError
    from trainer.compose import compose

    config = compose(arguments.overrides)
    try:
        from trainer.server.serve import serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"rlframe serve needs the package {error.name}: pip install 'rlframe[server]'.") from None
    serve(config)
