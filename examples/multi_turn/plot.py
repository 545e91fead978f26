"""Draw the runs of both algorithms: the mean over seeds as a line, all seeds as a band.

python plot.py runs -o curve.png      # runs/critic_seed0, runs/group_seed0, ...
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = {
    "eval/game:short_wordle/reward": "held-out games won (sampled)",
    "reward/mean": "training games won (sampled)",
    "critic/explained_variance": "critic: explained variance",
}
LABELS = {"critic": "critic, 64 games x 1", "group": "groups, 8 games x 8"}


def curve(run: Path, metric: str) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[metric] for row in rows if row.get(metric) is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("curve.png"))
    arguments = parser.parse_args()
    figure, axes = plt.subplots(1, len(PANELS), figsize=(4.6 * len(PANELS), 3.4))
    for kind, label in LABELS.items():
        runs = sorted(arguments.runs.glob(f"{kind}_seed*"))
        for axis, metric in zip(axes, PANELS, strict=True):
            curves = [c for run in runs if (c := curve(run, metric))]
            if not curves:
                continue
            steps = sorted(set.intersection(*(set(c) for c in curves)))
            values = np.array([[c[step] for step in steps] for c in curves])
            if metric == "reward/mean":
                values = np.array([np.convolve(v, np.ones(5) / 5, "valid") for v in values])
                steps = steps[2:-2]
            (line,) = axis.plot(steps, values.mean(0), label=f"{label} ({len(curves)} seeds)")
            axis.fill_between(steps, values.min(0), values.max(0), alpha=0.2, color=line.get_color(), linewidth=0)
    for axis, title in zip(axes, PANELS.values(), strict=True):
        axis.set(xlabel="step", title=title)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(arguments.output, dpi=110)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
