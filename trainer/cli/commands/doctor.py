"""``rlframe doctor``."""

from __future__ import annotations

import argparse

from trainer.cli.commands import ADDRESS

HELP = "check this machine"
DESCRIPTION = "Check what training needs on this machine and say what to do; exit code 1 if something is to be done."


def arguments(parser: argparse.ArgumentParser) -> None:
    """``--start`` and ``--address``."""
    parser.add_argument("--start", action="store_true", help="also start each engine on a tiny model (a minute)")
    parser.add_argument("--address", metavar="URL", help=f"compare with a cluster: {ADDRESS}")


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each check."""
    from trainer.cluster.doctor import check_all

    cluster = None
    if arguments.address:
        from trainer.cluster.submit import Cluster

        cluster = Cluster(arguments.address).ray_version
    todo = 0
    for finding in check_all(arguments.start, cluster):
        print(f"{'ok  ' if finding.todo is None else 'TODO'}  {finding.name}: {finding.text}", flush=True)
        if finding.todo is not None:
            todo += 1
            print(f"      -> {finding.todo}", flush=True)
    print("nothing to do" if not todo else f"{todo} to do")
    return int(todo > 0)
