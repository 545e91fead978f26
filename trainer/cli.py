"""The ``rlframe`` command. Heavy imports happen inside the commands, so that help and the list of presets come at once."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

OVERRIDES = "settings, such as algorithm=sao actor.optim.lr=1e-5 (docs/configuration.md)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, or with a line on stderr 1 (a run cannot go on), 2 (a setting is refused)."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the console is for the steps of the run
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest:  # argparse stops collecting overrides at an option between them
        if "overrides" not in arguments or any(text.startswith("-") for text in rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        arguments.overrides += rest
    try:
        return int(arguments.run(arguments) or 0)
    except KeyboardInterrupt:
        return 130
    except ValueError as error:
        from rlframe.config import ConfigError

        if not isinstance(error, ConfigError):
            raise
        print(f"rlframe: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        controller = sys.modules.get("trainer.controller")  # heavy; loaded if a run began
        if controller is None or not isinstance(error, controller.RunFailed):
            raise
        print(f"rlframe: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rlframe", description="Train language models from single, asynchronous rollouts.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    train = commands.add_parser("train", help="train a model", description="Train a model; without overrides, a tiny one.")
    train.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=OVERRIDES)
    train.add_argument("--dry-run", action="store_true", help="show configuration, placement and memory, and start nothing")
    train.set_defaults(run=_train)

    resume = commands.add_parser(
        "resume", help="go on with a run", description="Go on from the newest good checkpoint of a run."
    )
    resume.add_argument("run_dir", metavar="RUN", help="a run directory, such as runs/quickstart")
    resume.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="single settings to change, such as steps=500")
    resume.set_defaults(run=_resume)

    serve = commands.add_parser(
        "serve", help="serve the API of the tinker SDK", description="Serve sessions and samplers over HTTP (docs/server.md)."
    )
    serve.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings, such as model=smollm2 server.port=8000")
    serve.set_defaults(run=_serve)

    presets = commands.add_parser("presets", help="list the algorithms", description="List the presets of algorithm=...")
    presets.add_argument("--markdown", action="store_true", help="a table for the documentation")
    presets.set_defaults(run=_presets)

    settings = commands.add_parser("settings", help="list the settings", description="List settings, defaults and meanings.")
    settings.add_argument("section", nargs="?", metavar="KEY", help="only this section, such as actor.optim")
    settings.add_argument("--markdown", action="store_true", help="tables for the documentation")
    settings.set_defaults(run=_settings)
    return parser


def _train(arguments: argparse.Namespace) -> None:
    from trainer.compose import compose

    config = compose(arguments.overrides)
    if arguments.dry_run:
        from trainer.dry_run import report

        print(report(config))
        return
    from trainer.run import train

    train(config)


def _resume(arguments: argparse.Namespace) -> None:
    from trainer.run import resume

    resume(arguments.run_dir, arguments.overrides)


def _serve(arguments: argparse.Namespace) -> None:
    from rlframe.config import ConfigError
    from trainer.compose import compose

    config = compose(arguments.overrides)
    try:
        from trainer.server.serve import serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"rlframe serve needs the package {error.name}: pip install 'rlframe[server]'.") from None
    serve(config)


def _presets(arguments: argparse.Namespace) -> None:
    from trainer.presets import as_markdown, as_text

    _print(as_markdown() if arguments.markdown else as_text())


def _settings(arguments: argparse.Namespace) -> None:
    from trainer.reference import as_markdown, as_text

    _print(as_markdown() if arguments.markdown else as_text(arguments.section))


def _print(text: str) -> None:
    """Print a list that a user may pipe into ``head``: ending early is no error."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(text)


if __name__ == "__main__":
    sys.exit(main())
