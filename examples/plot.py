"""Draw metrics of one or more runs from their ``metrics.jsonl``.

python examples/plot.py runs/quickstart -o curve.png -m eval/arithmetic/reward reward/mean
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("curve.png"))
    parser.add_argument("-m", "--metrics", nargs="+", default=["eval/arithmetic/reward", "reward/mean"])
    parser.add_argument("-t", "--title", default="")
    arguments = parser.parse_args()
    figure, axes = plt.subplots(1, len(arguments.metrics), figsize=(5 * len(arguments.metrics), 3.4), squeeze=False)
    for axis, metric in zip(axes[0], arguments.metrics, strict=True):
        for run in arguments.runs:
            rows = [row for row in read(run) if row.get(metric) is not None]
            if not rows:
                raise SystemExit(f"{run} has no metric {metric}.")
            marker = "o" if metric.startswith("eval/") else None
            axis.plot([row["step"] for row in rows], [row[metric] for row in rows], marker=marker, markersize=3, label=run.name)
        axis.set(xlabel="step", title=metric)
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    if arguments.title:
        figure.suptitle(arguments.title)
    figure.tight_layout()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.output, dpi=110)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
