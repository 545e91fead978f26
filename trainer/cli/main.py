"""The ``rlframe`` command: the table of commands and the exit codes. Each command is a module of `trainer.cli.commands`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from rlframe import __version__
from trainer.cli.commands import (
    Command,
    doctor,
    export,
    job,
    metrics,
    presets,
    report,
    resume,
    rollouts,
    serve,
    settings,
    submit,
    timeline,
    train,
)
from trainer.settings.requirements import distribution_of

COMMANDS: dict[str, Command] = {
    "train": train,
    "resume": resume,
    "export": export,
    "submit": submit,
    "job": job,
    "doctor": doctor,
    "presets": presets,
    "settings": settings,
    "metrics": metrics,
    "rollouts": rollouts,
    "report": report,
    "timeline": timeline,
    "serve": serve,
}
"""Every command, in the order of ``rlframe --help``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns 0, or with a line on stderr 1 (a run cannot continue) or 2 (a setting is refused)."""
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
    except ModuleNotFoundError as error:
        needed = distribution_of(error.name or "")
        if needed is None:
            raise
        return _fail(2, f"this command needs {needed[0]}, which is not installed: pip install 'rlframe[{needed[1]}]'.")
    except ValueError as error:
        from rlframe.config import ConfigError

        if not isinstance(error, ConfigError):
            raise
        return _fail(2, str(error))
    except RuntimeError as error:
        from trainer.run.failures import RunFailed

        if not isinstance(error, RunFailed):
            raise
        return _fail(1, str(error))


def _fail(code: int, sentence: str) -> int:
    from trainer.settings.redact import redact_text

    print(f"rlframe: {redact_text(sentence)}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rlframe", description="Train language models from single, asynchronous rollouts.")
    parser.add_argument("--version", action="version", version=f"rlframe {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.HELP, description=command.DESCRIPTION)
        command.arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
