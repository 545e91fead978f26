"""Run a study: every arm with every seed through `rlframe train`, then a picture and a table of what came out.

python examples/study.py examples/quantized_sampler/study.yaml [steps=50 ...] [--seeds 0 1] [--arms TIS] [--jobs 2]

A study is a YAML file: ``common`` overrides, ``arms`` (name: overrides), ``seeds``, the ``metrics`` to draw and the ``table``.
Runs go to ``runs/<folder>/<file>/``, the picture beside the file. A run that is complete is not run again, one that was
interrupted continues.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

import matplotlib
import yaml

matplotlib.use("Agg")
import matplotlib.pyplot as plt

QUIET = ["log.wandb=disabled", "log.console=false", "log.rollouts_every=0", "checkpoint.every=50", "checkpoint.keep_last=1"]


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def load(path: Path) -> dict:
    """A study; ``like`` names a file beside it or elsewhere whose ``common`` overrides come before its own."""
    study = yaml.safe_load(path.read_text())
    if "like" in study:
        study["common"] = [*load(path.parent / study["like"])["common"], *study["common"]]
    return study


def rows_of(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train(run: Path, overrides: list[str], folder: Path | None = None) -> None:
    """One run, unless it is complete; modules and models of the study's own are found in its ``folder``."""
    command = [str(Path(sys.executable).parent / "rlframe")]
    if (run / "config.yaml").exists():
        steps = yaml.safe_load((run / "config.yaml").read_text())["steps"]
        rows = rows_of(run)
        if rows and rows[-1]["step"] >= steps:
            return
        command += ["resume", str(run)]
    else:
        command += ["train", f"run_dir={run}", f"name={run.name}", *overrides]
    print(" ".join(command), flush=True)
    subprocess.run(command, check=True, cwd=folder, env={"OMP_NUM_THREADS": "1"} | os.environ)


def value(row: dict, metric: str) -> float | None:
    """A number of one step; ``drift`` is the product that the paper names: E[A] times the size of E_q[score]."""
    if metric == "drift":
        parts = row.get("actor/advantage_mean"), row.get("rollout_corr/expected_score_l1")
        return None if None in parts else abs(parts[0]) * parts[1]
    return row.get(metric)


def series(run: Path, metric: str) -> dict[int, float]:
    """step -> value, where it was measured."""
    points = {row["step"]: value(row, metric) for row in rows_of(run)}
    return {step: v for step, v in points.items() if v is not None and v == v}


def smoothed(points: dict[int, float], window: int) -> dict[int, float]:
    """Means of ``window`` values in a row, at the step of the last of them."""
    items = list(points.items())
    chunks = [items[i : i + window] for i in range(0, len(items), window)]
    return {chunk[-1][0]: mean(v for _, v in chunk) for chunk in chunks}


def seconds(run: Path) -> dict[int, float]:
    """step -> seconds of training until then, without evaluations."""
    total, result = 0.0, {}
    for row in rows_of(run):
        total += row.get("time/step", 0.0) - row.get("time/eval", 0.0)
        result[row["step"]] = total
    return result


DASHES = ("-", "--", ":", "-.")


def draw(study: dict, runs: dict[str, list[Path]], output: Path) -> None:
    """Mean over seeds as a line, smallest to largest as a band; ``METRIC by seconds`` against the clock instead of the step.

    Arms called ``A, B`` share a colour by A and a dash by B.
    """
    metrics = study["metrics"]
    columns = min(len(metrics), 2)
    rows = -(-len(metrics) // columns)
    figure, _ = plt.subplots(rows, columns, figsize=(5.4 * columns, 3.3 * rows + 0.6), layout="constrained")
    families = list(dict.fromkeys(arm.partition(", ")[0] for arm in runs))
    variants = list(dict.fromkeys(arm.partition(", ")[2] for arm in runs))
    for axis, (what, label) in zip(figure.axes, metrics.items(), strict=False):
        metric, _, unit = what.partition(" by ")
        window = 1 if metric.startswith("eval/") else study.get("window", 10)
        for arm, paths in runs.items():
            curves = {path: c for path in paths if (c := smoothed(series(path, metric), window))}
            if not curves:
                continue
            steps = sorted(set.intersection(*(set(c) for c in curves.values())))
            columns_of = [[c[s] for c in curves.values()] for s in steps]
            clocks = [seconds(path) for path in curves]
            x = [mean(clock[s] for clock in clocks) for s in steps] if unit == "seconds" else steps
            family, _, variant = arm.partition(", ")
            colour = f"C{families.index(family)}"
            axis.plot(x, [mean(c) for c in columns_of], DASHES[variants.index(variant) % len(DASHES)], color=colour, label=arm)
            lowest, highest = [min(c) for c in columns_of], [max(c) for c in columns_of]
            axis.fill_between(x, lowest, highest, color=colour, alpha=0.15, linewidth=0)
        if what in study.get("log_scale", ()):
            axis.set_yscale("log")
        axis.set_xlabel(unit or "step")
        axis.set_title(label, fontsize=9)
        axis.grid(alpha=0.3)
    for axis in figure.axes[len(metrics) :]:
        axis.set_visible(False)
    labels = {label: handle for axis in figure.axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(study["title"])
    figure.savefig(output, dpi=100)


REDUCED = {
    "first": lambda values: values[0],
    "best": max,
    "last": lambda values: values[-1],
    "late": lambda values: mean(values[2 * len(values) // 3 :]),
    "mean": mean,
}
"""What a table makes of a run's series; ``late``: mean of the last third."""


def reduced(run: Path, metric: str, how: str) -> float | None:
    """One number of a run; None where it has none."""
    points = series(run, metric)
    return REDUCED[how](list(points.values())) if points else None


def table(study: dict, runs: dict[str, list[Path]]) -> str:
    """Markdown: ``study["table"]`` maps a column to ``METRIC REDUCTION``; mean and range over seeds."""
    columns = {label: what.rsplit(" ", 1) for label, what in study["table"].items()}
    lines = [f"| arm | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for arm, paths in runs.items():
        cells = []
        for metric, how in columns.values():
            found = [number for path in paths if (number := reduced(path, metric, how)) is not None]
            spread = f" ({min(found):.3g} to {max(found):.3g})" if len(found) > 1 else ""
            cells.append(f"{mean(found):.3g}{spread}" if found else "-")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def run_all(
    path: Path,
    *,
    root: Path,
    arms: list[str] | None = None,
    seeds: list[int] | None = None,
    overrides: list[str] | None = None,
    jobs: int = 1,
    train_them: bool = True,
) -> dict[str, list[Path]]:
    """Train what is not complete yet of the study in ``path``; arm -> run directories under ``root``, one for each seed."""
    study = load(path)
    chosen = {name: study["arms"][name] for name in arms or study["arms"]}
    numbers = study["seeds"] if seeds is None else seeds
    runs = {arm: [root.resolve() / f"{slug(arm)}_{seed}" for seed in numbers] for arm in chosen}
    if train_them:
        with ThreadPoolExecutor(jobs) as pool:
            tasks = [
                pool.submit(
                    train,
                    runs[arm][i],
                    [*QUIET, *study["common"], *own, f"seed={seed}", *(overrides or [])],
                    path.resolve().parent,
                )
                for i, seed in enumerate(numbers)
                for arm, own in chosen.items()
            ]
        for task in tasks:
            task.result()
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--arms", nargs="+")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--draw", action="store_true", help="only draw what is there")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    runs = run_all(
        given.study,
        root=Path("runs") / given.study.resolve().parent.name / given.study.stem,
        arms=given.arms,
        seeds=given.seeds,
        overrides=given.overrides,
        jobs=given.jobs,
        train_them=not given.draw,
    )
    study = load(given.study)
    draw(study, runs, given.study.with_suffix(".png"))
    print(table(study, runs))


if __name__ == "__main__":
    main()
