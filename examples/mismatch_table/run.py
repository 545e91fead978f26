"""The mismatch table: how far trainer and engine are apart when both hold the same weights, by how and in what they hold them.

python -m examples.mismatch_table.run [--draw] [--only adapter bf16 ...]

Every combination named in ``study.yaml`` is one run of `rlframe train` under ``runs/mismatch_table/``; a complete one is not
run again. Step 1 is measured on the base model (the adapter's delta is zero), the last step after large updates. Prints the
table and draws it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from examples.study import QUIET, plt, rows_of, slug, train

FOLDER = Path(__file__).parent
ROOT = Path("runs/mismatch_table")
K3, LARGEST = "rollout_corr/k3_kl", "rollout_corr/log_ratio_abs_max"
Arm = tuple[str, ...]
"""Engine, dtype, sync, prompts."""
COLUMNS = ("engine", "dtype", "sync", "prompts")


def arms_of(study: dict[str, Any]) -> dict[Arm, list[str]]:
    """Every arm once, in order, with its overrides."""
    arms: dict[Arm, list[str]] = {}
    for block in study["arms"]:
        for arm in itertools.product(*(block[column] for column in COLUMNS)):
            chosen = zip(COLUMNS, arm, strict=True)
            arms[arm] = [override for column, choice in chosen for override in study["choices"][column][choice]]
    return arms


def write_prompts(path: Path) -> None:
    """The requests of examples/smollm2_sentences as plain strings, which a chat template may or may not be put around."""
    rows = [json.loads(line) for line in (FOLDER.parent / "smollm2_sentences" / "prompts.jsonl").read_text().splitlines()]
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": row["prompt"][-1]["content"], "word": row["word"]}) for row in rows]
    path.write_text("\n".join(lines) + "\n")


def measured(run: Path) -> dict[str, tuple[float, float]] | None:
    """(K3, largest absolute log-ratio) of ``zero`` (step 1) and ``trained`` (the last step); None if it is not there yet."""
    rows = {row["step"]: row for row in rows_of(run)}
    steps = yaml.safe_load((run / "config.yaml").read_text())["steps"] if rows else None
    if steps not in rows:
        return None
    return {name: (rows[step][K3], rows[step][LARGEST]) for name, step in (("zero", 1), ("trained", steps))}


def table(results: dict[Arm, dict[str, tuple[float, float]]]) -> str:
    """Markdown, a line an arm."""
    lines = [f"| {' | '.join(COLUMNS)} | K3, zero delta | trained | max abs log-ratio, zero delta | trained |"]
    lines.append("|" + "---|" * (len(COLUMNS) + 4))
    for arm, result in results.items():
        zero, trained = result["zero"], result["trained"]
        numbers = [f"{zero[0]:.1e}", f"{trained[0]:.1e}", f"{zero[1]:.2g}", f"{trained[1]:.2g}"]
        lines.append(f"| {' | '.join([*arm, *numbers])} |")
    return "\n".join(lines)


def draw(results: dict[Arm, dict[str, tuple[float, float]]], output: Path) -> None:
    """Two panels, a row an arm: the base model as an open mark, after the updates as a full one."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 0.34 * len(results) + 1.4), sharey=True)
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(arm[1] for arm in results))}
    for axis, (number, title) in zip(axes, enumerate(("K3", "largest absolute log-ratio, nats")), strict=True):
        for y, (arm, result) in enumerate(results.items()):
            zero, trained = result["zero"][number], result["trained"][number]
            axis.plot([zero, trained], [y, y], color=colours[arm[1]], linewidth=1)
            axis.plot(zero, y, "o", color=colours[arm[1]], markerfacecolor="white")
            axis.plot(trained, y, "o", color=colours[arm[1]])
        axis.set_xscale("log")
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
    axes[0].set_yticks(range(len(results)), [", ".join(arm) for arm in results], fontsize=8)
    axes[0].invert_yaxis()
    figure.suptitle("Trainer against engine, same weights: base model (open), after updates (full)", fontsize=10)
    figure.tight_layout()
    figure.savefig(output, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="only draw what is there")
    parser.add_argument("--only", nargs="+", default=[], help="arms that are all of this, such as: vllm bf16")
    arguments = parser.parse_args()
    study = yaml.safe_load((FOLDER / "study.yaml").read_text())
    prompts = ROOT / "prompts.jsonl"
    write_prompts(prompts)
    results = {}
    for arm, overrides in arms_of(study).items():
        run = ROOT / slug(" ".join(arm))
        if not arguments.draw and set(arguments.only) <= set(arm):
            train(run, [*QUIET, f"task.train={prompts}", *study["common"], *overrides])
            shutil.rmtree(run / "checkpoints", ignore_errors=True)  # of all weights: 2 GB
        if result := measured(run):
            results[arm] = result
    draw(results, FOLDER / "table.png")
    print(table(results))


if __name__ == "__main__":
    main()
