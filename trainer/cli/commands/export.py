"""``rlframe export``."""

from __future__ import annotations

import argparse

HELP = "write a trained policy for other tools"
DESCRIPTION = "Write the policy of a checkpoint as a PEFT adapter, or as a whole Hugging Face model. Needs no Ray and no GPU."


def arguments(parser: argparse.ArgumentParser) -> None:
    """The run, the step, the kind of folder."""
    parser.add_argument("run_dir", metavar="RUN", help="a run directory, such as runs/quickstart")
    parser.add_argument("--step", type=int, metavar="N", help="of this checkpoint; without it, of the newest good one")
    parser.add_argument("--merged", action="store_true", help="the whole model with the adapter added")
    parser.add_argument("--output", metavar="DIR", help="new folder; without it, export/step_N in the run directory")


def run(arguments: argparse.Namespace) -> None:
    """Export, and say where."""
    from trainer.cli.export import export

    print(export(arguments.run_dir, arguments.step, arguments.merged, arguments.output))
