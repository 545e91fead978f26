"""``rlframe report``."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "write a page about runs"
DESCRIPTION = "Write one self-contained HTML page: curves of one or more runs and a token-level viewer of their rollouts."


def arguments(parser: argparse.ArgumentParser) -> None:
    """The runs and where the page goes."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories, such as runs/quickstart")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where to (default: RUN/report.html, or report.html for several runs)"
    )
    parser.add_argument(
        "--samples", type=int, default=12, metavar="N", help="sampled steps of a run whose rollouts are shown (default: 12)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Write the page and say where it is."""
    from trainer.watch.report import write_report

    runs = [Path(name) for name in arguments.runs]
    output = Path(arguments.output or (runs[0] / "report.html" if len(runs) == 1 else "report.html"))
    write_report(runs, output, arguments.samples)
    print(f"wrote {output} ({output.stat().st_size / 2**20:.1f} MiB)")
