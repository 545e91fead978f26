"""``rlframe job``: list, status, logs, stop."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from trainer.cli.commands import ADDRESS, show

if TYPE_CHECKING:
    from trainer.cluster.submit import Cluster

HELP = "list, follow and stop jobs of a cluster"
DESCRIPTION = "Query jobs of a Ray cluster. A stopped job finishes its step and saves; `rlframe submit --resume` continues it."


def arguments(parser: argparse.ArgumentParser) -> None:
    """A verb, a job and the address."""
    address = argparse.ArgumentParser(add_help=False)
    address.add_argument("--address", metavar="URL", help=ADDRESS)
    verbs = parser.add_subparsers(metavar="VERB", required=True, dest="verb")
    verbs.add_parser("list", help="all jobs, newest first", parents=[address])
    for verb, text in (("status", "how a job is"), ("logs", "what it prints"), ("stop", "end it, after a checkpoint")):
        one = verbs.add_parser(verb, help=text, parents=[address])
        one.add_argument("job_id", metavar="ID", help="as `rlframe submit` printed it")
        if verb == "logs":
            one.add_argument("-f", "--follow", action="store_true", help="until it ends; exit code 1 unless it succeeds")


def run(arguments: argparse.Namespace) -> int:
    """Ask; returns the exit code."""
    from trainer.cluster.submit import Cluster

    cluster = Cluster(arguments.address)
    if arguments.verb == "list":
        show("\n".join("  ".join(job) for job in cluster.list()))
        return 0
    job_id: str = arguments.job_id
    if arguments.verb == "status":
        print("  ".join(part for part in cluster.status(job_id) if part))
    elif arguments.verb == "stop":
        print("stopping; a checkpoint is written" if cluster.stop(job_id) else "it has ended already")
    elif arguments.follow:
        return follow(cluster, job_id)
    else:
        show(cluster.logs(job_id).rstrip("\n"))
    return 0


def follow(cluster: Cluster, job_id: str) -> int:
    """Show what the job prints until it ends; 0 if it succeeded, else 1."""

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        status = cluster.follow(job_id, write)
    except KeyboardInterrupt:
        print(f"\nthe job continues; `rlframe job logs -f {job_id}` shows it again", file=sys.stderr)
        raise
    print(f"{job_id} {status.value}")
    return 0 if status.value == "SUCCEEDED" else 1
