"""``rlframe rollouts``."""

from __future__ import annotations

import argparse

HELP = "show sampled rollouts of a run"
DESCRIPTION = "Show trajectories that a run has sampled, token by token: log-probability, ratio, value, advantage, version."


def arguments(parser: argparse.ArgumentParser) -> None:
    """The run, and which trajectories of it."""
    parser.add_argument("run_dir", metavar="RUN", help="a run directory, such as runs/quickstart")
    parser.add_argument("--step", type=int, metavar="N", help="the step to show (default: the newest one that was sampled)")
    parser.add_argument("--prompt", metavar="ID", help="only this prompt, in all sampled steps unless --step is given")
    parser.add_argument("-n", "--count", type=int, default=4, metavar="N", help="most trajectories to show (default: 4)")
    parser.add_argument(
        "--tokens", type=int, default=40, metavar="N", help="most tokens of one trajectory in its table; 0: only the texts"
    )


def run(arguments: argparse.Namespace) -> None:
    """Print the trajectories."""
    import signal
    from pathlib import Path

    from trainer.watch.rollouts_view import show_rollouts

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    show_rollouts(Path(arguments.run_dir), arguments.step, arguments.prompt, arguments.count, arguments.tokens)
