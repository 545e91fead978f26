"""Study of the head size k of score centering: gradient error, head mass, and what a head costs.

python -m examples.head_size.run [--measure | --draw] [--only rollouts | cost]

Runs of `rlframe train` go to ``runs/head_size/``; complete ones are not run again. Errors are measured on the trajectories in
their checkpoints, which carry the sampler's whole distribution, and written to ``runs/head_size/errors.json``. Prints the
tables and draws the picture. What is measured is in `examples.head_size.gradients`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml

from examples.head_size import gradients
from examples.study import QUIET, plt, rows_of, slug, train
from rlframe.alignment import action_rows
from rlframe.backbone import Backbone
from rlframe.models import resolve_model
from rlframe.types import Batch
from trainer.run.recovery import read_batches
from trainer.settings.compose import load_yaml
from workers.learner.sessions import actor_spec

FOLDER = Path(__file__).parent
ROOT = Path("runs/head_size")
SIZES = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096]
"""Heads whose logit gradients are compared; 0: not centred."""
PARAMETER_SIZES = [0, 1, 4, 8, 32, 128]
"""Heads whose parameter gradients are compared."""
ROUNDING = 1e-5
"""Relative differences below this are float32's, not the head's."""
CHUNK = 64
"""Tokens whose whole distributions are held in float64 at once."""


def trajectories(run: Path) -> Batch:
    """The finished trajectories in a run's last checkpoint."""
    checkpoint = run / "checkpoints" / (run / "checkpoints" / "LATEST").read_text().strip()
    return Batch.concat(read_batches(checkpoint))


def policy(run: Path) -> Any:
    """The actor of a run, as it was at the start, in this process."""
    config = load_yaml(run / "config.yaml", [])
    backbone = Backbone.load(resolve_model(config.model), mesh=None, device=torch.device("cpu"), dtype=config.model.dtype)
    return backbone.create_session("actor", actor_spec(config))


def logit_errors(log_p: torch.Tensor, log_q: torch.Tensor, tokens: torch.Tensor) -> dict[str, Any]:
    """Squared norms for every rule and size, and the mass of every head, summed over tokens.

    Returns:
        ``exact`` and ``wrong`` (rule -> k -> sum of squared differences from the exact gradient), ``mass`` (k -> [q, p]).
    """
    sums: dict[str, Any] = {"exact": {}, "wrong": {}, "mass": {}}
    for rule in gradients.RULES:
        wanted = gradients.exact(rule, log_p, log_q, tokens)
        sums["exact"][rule] = float(wanted.square().sum())
        sums["wrong"][rule] = {
            k: float((gradients.from_head(rule, log_p, log_q, tokens, k) - wanted).square().sum())
            for k in [*SIZES, log_p.shape[1]]
            if k <= log_p.shape[1]
        }
    for k in SIZES[1:]:
        if k <= log_p.shape[1]:
            head = log_q.topk(k)
            sums["mass"][k] = [float(head.values.exp().sum()), float(log_p.gather(1, head.indices).exp().sum())]
    return sums


def added(a: Any, b: Any) -> Any:
    """Leaf by leaf."""
    if isinstance(a, dict):
        return {key: added(a[key], b[key]) for key in a}
    return [added(x, y) for x, y in zip(a, b, strict=True)] if isinstance(a, list) else a + b


def measure(run: Path) -> dict[str, Any]:
    """All errors of one sampler against the trainer of its run, as JSON."""
    batch, session = trajectories(run), policy(run)
    rows, producers = action_rows(batch)
    with torch.no_grad(), session.adapter.active():
        hidden, head = session.backbone.run(batch, lambda hidden, head: (hidden[producers], head))
    log_q, tokens = gradients.dense_sampler(batch), torch.from_numpy(batch.tokens[rows]).long()
    sums, mismatch = None, 0.0
    for first in range(0, len(rows), CHUNK):
        part = slice(first, first + CHUNK)
        log_p = gradients.trainer_logprobs(hidden[part], head)
        mismatch += float((log_q[part].exp() * (log_q[part] - log_p)).sum())
        found = logit_errors(log_p, log_q[part], tokens[part])
        sums = found if sums is None else added(sums, found)
    assert sums is not None
    count = len(rows)
    parameters, seconds = gradients.parameter_gradients(session, batch, [*PARAMETER_SIZES, log_q.shape[1]])
    return {
        "tokens": count,
        "vocabulary": log_q.shape[1],
        "trajectories": len(batch),
        "kl": mismatch / count,
        "mass": {k: [q / count, p / count] for k, (q, p) in sums["mass"].items()},
        "logits": {
            rule: {
                k: {"of_gradient": (wrong / sums["exact"][rule]) ** 0.5, "of_correction": _quotient(wrong, by_size[0])}
                for k, wrong in by_size.items()
            }
            for rule, by_size in sums["wrong"].items()
        },
        "cpu_seconds": {k: min(values) for k, values in seconds.items()},
        "parameters": {rule: _parameter_errors(parameters, rule) for rule in gradients.RULES},
    }


def _quotient(squares: float, of: float) -> float | None:
    return (squares / of) ** 0.5 if of > 0 else None


def _parameter_errors(found: dict[tuple[str, int | str], torch.Tensor], rule: str) -> dict[int, Any]:
    wanted, plain = found[rule, "exact"], found[rule, 0]
    return {
        k: {
            "of_gradient": gradients.relative_error(found[rule, k], wanted),
            "of_correction": gradients.relative_error(found[rule, k], wanted, plain),
        }
        for name, k in found
        if name == rule and isinstance(k, int)
    }


def cost(run: Path) -> dict[str, float]:
    """Least seconds of a step, over the steps after the first: others may have used the machine, too."""
    rows = rows_of(run)[2:]
    tokens = [row["perf/tokens_per_s"] for row in rows]
    return {"train_actor": min(r["time/train_actor"] for r in rows), "tokens_per_s": max(tokens)} if rows else {}


def tables(errors: dict[str, Any], costs: dict[str, dict[str, float]]) -> str:
    """Markdown: relative errors, in brackets as a fraction of the correction that centring makes; then costs."""

    def cell(by_size: dict[str, Any], k: str) -> str:
        if by_size["0"]["of_gradient"] < ROUNDING:
            return "nothing to correct"
        found = by_size[k]
        return f"{found['of_gradient']:.2g}" if k == "0" else f"{found['of_gradient']:.2g} ({found['of_correction']:.2g})"

    lines = []
    for sampler, found in errors.items():
        lines += [f"\n{sampler}: {found['trajectories']} answers, {found['tokens']} tokens, KL(q, p) {found['kl']:.2g}\n"]
        names = [f"{rule}, {what}" for rule in gradients.RULES for what in ("logits", "adapter")]
        lines += ["| k | mass q | mass p | " + " | ".join(names) + " |", "|" + "---|" * (3 + len(names))]
        for k in map(str, PARAMETER_SIZES):
            cells = [f"{x:.3f}" for x in found["mass"].get(k, ())] or ["0", "0"]
            cells += [cell(found[what][rule], k) for rule in gradients.RULES for what in ("logits", "parameters")]
            lines.append(f"| {k} | " + " | ".join(cells) + " |")
        if seconds := found.get("cpu_seconds"):
            lines += ["", "CPU seconds of the loss: " + ", ".join(f"k={k} {value:.2f}" for k, value in seconds.items())]
    if any(costs.values()):
        lines += ["\n| k | seconds of `train_actor` | sampled tokens a second |", "|---|---|---|"]
        lines += [f"| {k} | {c['train_actor']:.2f} | {c['tokens_per_s']:.0f} |" for k, c in costs.items() if c]
    return "\n".join(lines)


def draw(errors: dict[str, Any], output: Path) -> None:
    """Error over k, a column for every sampler: logit gradients above, the batch's parameter gradient below."""
    figure, axes = plt.subplots(2, len(errors), figsize=(3.6 * len(errors), 6.4), sharey="row", squeeze=False)
    for column, (sampler, found) in enumerate(errors.items()):
        for rule, colour in zip(gradients.RULES, ("C0", "C1", "C2"), strict=True):
            panels = (found["logits"], found["parameters"])
            for axis, by_rule in zip(axes[:, column], panels, strict=True):
                if by_rule[rule]["0"]["of_gradient"] < ROUNDING:
                    axis.plot([], [], color=colour, label=f"{rule}: nothing to correct")
                    continue
                points = {int(k): v["of_gradient"] for k, v in by_rule[rule].items() if k != str(found["vocabulary"])}
                plain = points.pop(0, None)
                axis.plot(list(points), list(points.values()), "o-", color=colour, label=rule, markersize=3)
                if plain:
                    axis.axhline(plain, color=colour, linestyle=":", linewidth=1)
                axis.set_xscale("log")
                axis.set_yscale("log")
                axis.grid(alpha=0.3)
        axes[0, column].legend(fontsize=8)
        axes[0, column].set_title(f"{sampler}\nlogit gradients", fontsize=9)
        axes[1, column].set_title("gradient of the adapter, all advantages 1", fontsize=9)
        axes[1, column].set_xlabel("k")
    for axis in axes[:, 0]:
        axis.set_ylim(bottom=ROUNDING)
    figure.suptitle("Relative gradient error against centring over the whole vocabulary (dotted: not centred)", fontsize=10)
    figure.tight_layout()
    figure.savefig(output, dpi=100)


def train_all(study: dict[str, Any], only: str | None) -> None:
    """Every run that is not there yet."""
    for sampler, overrides in study["samplers"].items() if only != "cost" else ():
        head = f"rollout.head_size={study['full']}"
        train(ROOT / slug(sampler), [*QUIET, *study["common"], *overrides, *study["rollouts"], head])
    for k in study["cost"]["sizes"] if only != "rollouts" else ():
        run = ROOT / f"cost_{k}"
        train(run, [*QUIET, *study["common"], *study["cost"]["overrides"], f"rollout.head_size={k}"])
        shutil.rmtree(run / "checkpoints", ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure again on the rollouts that are there")
    parser.add_argument("--draw", action="store_true", help="only draw what is there")
    parser.add_argument("--only", choices=["rollouts", "cost"], help="one half of the study")
    arguments = parser.parse_args()
    study = yaml.safe_load((FOLDER / "study.yaml").read_text())
    file = ROOT / "errors.json"
    errors: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if not arguments.draw and not arguments.measure:
        train_all(study, arguments.only)
    for sampler in study["samplers"] if not arguments.draw else ():
        run = ROOT / slug(sampler)
        if (arguments.measure or sampler not in errors) and (run / "checkpoints" / "LATEST").exists():
            errors[sampler] = json.loads(json.dumps(measure(run)))
            file.write_text(json.dumps(errors, indent=1))
    draw(errors, FOLDER / "errors.png")
    print(tables(errors, {str(k): cost(ROOT / f"cost_{k}") for k in study["cost"]["sizes"]}))


if __name__ == "__main__":
    main()
