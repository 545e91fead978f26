"""``rlframe report``: one or more runs as one HTML page that needs nothing else. What it draws is in ``trainer/watch/page/``.

The page is static text around a JSON block. Whatever a model sampled sits in that block, escaped so that no HTML parser can
see a tag in it, and its scripts write it as text only; a content security policy lets no other script run.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import html
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

import yaml

from rlframe.config import ConfigError
from trainer.settings.redact import without_secrets
from trainer.watch import samples
from trainer.watch.glossary import meaning

PAGE = Path(__file__).parent / "page"
MAX_POINTS = 2000
"""Points of one curve in the page."""
SECTIONS = {
    "Reward": ("reward/mean", "eval/*/reward", "response_length/mean", "actor/entropy"),
    "Critic": ("critic/explained_variance", "critic/explained_variance_mse", "critic/value_loss"),
    "Mismatch of sampler and trainer": (
        "rollout_corr/kl",
        "rollout_corr/k3_kl",
        "rollout_corr/rollout_is_eff_sample_size",
        "actor/clip_fraction",
        "actor/grad_norm",
    ),
    "Staleness": ("off_policy/mean", "off_policy/max"),
    "Where the time goes": ("idle/trainer", "idle/rollout", "time/step", "perf/accepted_tokens_per_s"),
}
"""Curves shown at once, in this order; all others follow on demand."""
SUMMARY = ("steps", "eval, first", "eval, last", "eval, best", "reward, last 10", "ev, last 10", "k3 KL, last 10", "stale, max")


def write_report(runs: Sequence[Path], output: Path, sampled_steps: int = 12) -> None:
    """Write the page of ``runs`` to ``output``, with at most ``sampled_steps`` samples of rollouts of each.

    Raises:
        ConfigError: a directory is not that of a run, or has logged nothing yet.
    """
    page = build_page([read_run(run, sampled_steps) for run in runs])
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(output.name + ".tmp")
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, output)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``; a last line that is still being written is left out.

    Raises:
        ConfigError: there is none.
    """
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(f"{run} is not the directory of a run that has logged something: it has no metrics.jsonl.")
    rows = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    if not rows:
        raise ConfigError(f"{path} has no step yet.")
    return rows


def read_run(run: Path, sampled_steps: int) -> dict[str, Any]:
    """What the page shows of one run (JSON-like)."""
    rows = read_metrics(run)
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for row in rows:
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float) and math.isfinite(value):
                steps, values = curves.setdefault(key, ([], []))
                steps.append(row["step"])
                values.append(float(f"{value:.6g}"))
    found = samples.sampled_steps(run)
    chosen = _spread(list(found), sampled_steps)
    return {
        "name": run.resolve().name,
        "summary": summarise(curves),
        "metrics": {key: _thinned(*curve) for key, curve in curves.items()},
        "axes": {"seconds": _total(rows, "time/step"), "tokens": _total(rows, "perf/accepted_tokens_per_s", "time/step")},
        "config": _read_config(run / "config.yaml"),
        "samples": [{"step": step, "rows": samples.read(found[step])} for step in chosen],
    }


def summarise(curves: dict[str, tuple[list[int], list[float]]]) -> list[float | None]:
    """The row of a run in the table on top, see ``SUMMARY``."""

    def tail(key: str) -> float | None:
        last = curves.get(key, ([], []))[1][-10:]
        return float(f"{math.fsum(last) / len(last):.6g}") if last else None

    held_out = next((values for key, (_, values) in curves.items() if fnmatch.fnmatch(key, "eval/*/reward")), [None])
    stale = curves.get("off_policy/max", ([], [None]))[1]
    return [
        max(steps[-1] for steps, _ in curves.values()) if curves else None,
        held_out[0],
        held_out[-1],
        max((x for x in held_out if x is not None), default=None),
        tail("reward/mean"),
        tail("critic/explained_variance"),
        tail("rollout_corr/k3_kl"),
        max((x for x in stale if x is not None), default=None),
    ]


def build_page(runs: list[dict[str, Any]]) -> str:
    """The HTML of the page."""
    _make_names_unique(runs)
    known = sorted({key for run in runs for key in run["metrics"]})
    data = {
        "runs": runs,
        "summary": SUMMARY,
        "sections": [
            {"title": title, "keys": [key for pattern in patterns for key in fnmatch.filter(known, pattern)]}
            for title, patterns in SECTIONS.items()
        ],
        "meanings": {key: meaning(key) for key in known},
    }
    script = "\n".join((PAGE / name).read_text(encoding="utf-8") for name in ("charts.js", "rollouts.js"))
    style = (PAGE / "style.css").read_text(encoding="utf-8")
    policy = f"default-src 'none'; script-src 'sha256-{_digest(script)}'; style-src 'sha256-{_digest(style)}'; base-uri 'none'"
    return Template((PAGE / "page.html").read_text(encoding="utf-8")).substitute(
        policy=policy,
        title=html.escape("rlframe: " + ", ".join(run["name"] for run in runs)),
        date=time.strftime("%Y-%m-%d %H:%M"),
        style=style,
        script=script,
        data=as_script_data(data),
    )


def as_script_data(data: Any) -> str:
    """JSON that stays inside of its ``<script>`` element whatever strings it holds."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _total(rows: list[dict[str, Any]], *factors: str) -> tuple[list[int], list[float]]:
    """The running sum over steps of a product of metrics, 0 before the first; empty when the run lacks one of them."""
    steps, totals = [0], [0.0]
    for row in rows:
        numbers = [row.get(name) for name in factors]
        if None not in numbers:
            steps.append(row["step"])
            totals.append(float(f"{totals[-1] + math.prod(float(x) for x in numbers if x is not None):.6g}"))
    return _thinned(steps, totals) if len(steps) > 1 else ([], [])


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _spread(items: list[int], count: int) -> list[int]:
    """At most ``count`` of ``items``, first and last among them, evenly spaced."""
    if len(items) <= count:
        return items
    if count < 2:
        return items[len(items) - count :]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _thinned(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    kept = _spread(list(range(len(steps))), MAX_POINTS)
    return [steps[i] for i in kept], [values[i] for i in kept]


def _read_config(path: Path) -> dict[str, str]:
    """Settings as ``key: value`` text, secrets hidden; empty when the file is missing or not YAML."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    return dict(_leaves(without_secrets(tree))) if isinstance(tree, dict) else {}


def _leaves(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    leaves: list[tuple[str, str]] = []
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            leaves += _leaves(value, f"{prefix}{name}.")
        else:
            leaves.append((f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)))
    return leaves


def _make_names_unique(runs: list[dict[str, Any]]) -> None:
    """Give runs of the same directory name a number."""
    names = [run["name"] for run in runs]
    for i, run in enumerate(runs):
        if names.count(run["name"]) > 1:
            run["name"] = f"{names[i]} ({names[: i + 1].count(names[i])})"
