"""``rlframe submit``."""

from __future__ import annotations

import argparse

from trainer.cli.commands import ADDRESS, OVERRIDES

HELP = "train on a running cluster"
DESCRIPTION = (
    "Check the settings here, send the job to a Ray cluster, and show what it prints. Ctrl-C stops showing, not the job."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Address, overrides, and how the job runs."""
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=OVERRIDES)
    parser.add_argument("--address", metavar="URL", help=ADDRESS)
    parser.add_argument("--resume", metavar="RUN", help="resume this run instead (a path on the cluster)")
    parser.add_argument("--working-dir", default=".", metavar="DIR", help="folder that the job gets a copy of; '' for none")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable, never a secret")
    parser.add_argument("--id", dest="job_id", metavar="ID", help="id of the job; Ray makes one up")
    parser.add_argument("--no-wait", action="store_true", help="print the id of the job and leave")
    parser.add_argument("--dry-run", action="store_true", help="show what would be sent, and send nothing")


def run(arguments: argparse.Namespace) -> int:
    """Send the job; 0 if it succeeds (or was sent, with ``--no-wait``), 1 if not."""
    import yaml

    from trainer.cluster.submit import Cluster, resuming, training

    working_dir = arguments.working_dir or None
    if arguments.resume:
        job = resuming(arguments.resume, arguments.overrides, working_dir, arguments.env)
    else:
        job = training(arguments.overrides, working_dir, arguments.env)
    if arguments.dry_run:
        print(yaml.safe_dump({"entrypoint": job.entrypoint, "runtime_env": job.runtime_env}, sort_keys=False), end="")
        return 0
    cluster = Cluster(arguments.address)
    job_id = cluster.submit(job, arguments.job_id)
    print(job_id, flush=True)
    if arguments.no_wait:
        return 0
    from trainer.cli.commands.job import follow

    return follow(cluster, job_id)
