"""``rlframe resume``."""

from __future__ import annotations

import argparse

HELP = "resume a run"
DESCRIPTION = "Go on from the newest good checkpoint of a run."


def arguments(parser: argparse.ArgumentParser) -> None:
    """The run and what to change in it."""
    parser.add_argument("run_dir", metavar="RUN", help="a run directory, such as runs/quickstart")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="single settings to change, such as steps=500")


def run(arguments: argparse.Namespace) -> None:
    """Resume the run."""
    from workers.process import without_garbage_collection

    with without_garbage_collection():
        from trainer.run.job import resume

    resume(arguments.run_dir, arguments.overrides)
