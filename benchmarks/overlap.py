"""Does a step of an asynchronous run cost the longer of rollout and training, where a synchronous one costs their sum?

    python benchmarks/overlap.py [--engine torch|vllm] [--latency 1.0] [--steps 16] [SETTING=VALUE ...]

Two runs of the whole thing (Ray, engine, learner, controller) on an environment that waits before it answers, as a tool does:

- synchronous (``max_staleness=0``): its rollout time (``time/wait_for_batch``) and training time (the rest of the step).
- asynchronous (``max_staleness=2``): its step time, which the bar holds against 1.15 times the longer of the two.

Medians over the steps after the first ones; both idle ratios are those that every step logs. Everything is wall-clock time, so
run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlframe.types import Prompt
from trainer.run.job import train
from trainer.settings.compose import compose
from workers.environments.arithmetic import Arithmetic
from workers.environments.base import StepResult

BAR = 1.15
SKIPPED = 4
"""Steps before the steady state: the pipeline fills, kernels warm up."""
SETTINGS = (
    "task.name=overlap:Waiting",
    "actor=full",
    "batch_size=32",
    "critic.updates_per_step=4",
    "eval.size=8",
    "eval.every=0",
    "checkpoint.every=0",
    "rollout.probe_every=0",
    "log.wandb=disabled",
    "log.console=false",
    "log.rollouts_every=0",
)


class Waiting(Arithmetic):
    """Sums whose answers are looked at for a while: between half and the whole of ``task.options.latency_s``, by the prompt."""

    def __init__(self, task, tokenizer, *, seed: int, eval_size: int) -> None:
        self.latency_s = task.options["latency_s"]
        super().__init__(replace(task, options={}), tokenizer, seed=seed, eval_size=eval_size)

    def episode(self, prompt: Prompt) -> Waiting.Episode:
        episode = self.Episode(self.tokenizer, prompt)
        episode.wait_s = self.latency_s * (1 - prompt.index % 8 / 14)
        return episode

    class Episode(Arithmetic.Episode):
        wait_s = 0.0

        async def step(self, action: np.ndarray, finish: str) -> StepResult:
            await asyncio.sleep(self.wait_s)
            return await super().step(action, finish)


def steady_steps(name: str, folder: Path, options: argparse.Namespace, *more: str) -> list[dict]:
    """Metrics of the steady-state steps of one run."""
    config = compose(
        [
            *SETTINGS,
            f"rollout={options.engine}",
            f"steps={options.steps}",
            f"+task.options.latency_s={options.latency}",
            f"run_dir={folder / name}",
            *more,
            *options.settings,
        ]
    )
    train(config)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return rows[1 + SKIPPED :]


def median(rows: list[dict], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="settings of both runs")
    parser.add_argument("--engine", default="torch", choices=["torch", "vllm"])
    parser.add_argument("--latency", type=float, default=1.0, help="seconds that the slowest answer waits")
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        alone = steady_steps("synchronous", Path(folder), options, "max_staleness=0")
        both = steady_steps("asynchronous", Path(folder), options, "max_staleness=2")
    step = median(alone, "time/step")
    rollout = median(alone, "time/wait_for_batch")
    training = statistics.median(row["time/step"] - row["time/wait_for_batch"] for row in alone)
    overlapped = median(both, "time/step")
    for name, rows in (("synchronous", alone), ("asynchronous", both)):
        print(
            f"{name:12s} step {median(rows, 'time/step'):.2f} s, idle: trainer {median(rows, 'idle/trainer'):.0%}, "
            f"rollout {median(rows, 'idle/rollout'):.0%}; staleness up to {max(row['off_policy/max'] for row in rows):.0f}"
        )
    longest = max(rollout, training)
    print(f"synchronous: rollout {rollout:.2f} s + training {training:.2f} s = {rollout + training:.2f} s (step {step:.2f} s)")
    print(
        f"asynchronous: {overlapped:.2f} s a step is {overlapped / longest:.2f} of the longer of the two ({longest:.2f} s; "
        f"bar {BAR}) and {overlapped / step:.2f} of the synchronous step"
    )
    sys.exit(overlapped > BAR * longest)


if __name__ == "__main__":
    main()
