"""``rlframe train``."""

from __future__ import annotations

import argparse

from trainer.cli.commands import OVERRIDES

HELP = "train a model"
DESCRIPTION = "Train a model; without overrides, a tiny one."


def arguments(parser: argparse.ArgumentParser) -> None:
    """Overrides and ``--dry-run``."""
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=OVERRIDES)
    parser.add_argument("--dry-run", action="store_true", help="show configuration, placement and memory, and start nothing")


def run(arguments: argparse.Namespace) -> None:
    """Compose the configuration and train, or describe it."""
    from trainer.settings.compose import compose

    config = compose(arguments.overrides)
    if arguments.dry_run:
        from trainer.cli.dry_run import report

        print(report(config))
        return
    from trainer.cluster.folders import new_run_dir, refuse_lost_run_dir
    from trainer.cluster.head import prestarted_head
    from trainer.cluster.placement import plan
    from trainer.cluster.preflight import check_machine
    from workers.process import interruptible, without_garbage_collection

    refuse_lost_run_dir(config.run_dir)
    new_run_dir(config.run_dir)
    check_machine(config)
    interruptible()
    with prestarted_head(plan(config)):
        with without_garbage_collection():
            from trainer.run.job import train
        train(config)
