"""``rlframe timeline``."""

from __future__ import annotations

import argparse

HELP = "write a trace of what ran when"
DESCRIPTION = (
    "Write a trace of controller loops, episodes, engine pauses and learner phases; Perfetto and chrome://tracing open it."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The run, and where the trace goes."""
    parser.add_argument("run_dir", metavar="RUN", help="a run directory, such as runs/quickstart")
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write (default: RUN/timeline.json)")


def run(arguments: argparse.Namespace) -> None:
    """Write the file."""
    from pathlib import Path

    from trainer.watch.timeline import write_timeline

    run_dir = Path(arguments.run_dir)
    output = Path(arguments.output) if arguments.output else run_dir / "timeline.json"
    count = write_timeline(run_dir, output)
    print(f"{output}: {count} events; open it at https://ui.perfetto.dev or chrome://tracing")
