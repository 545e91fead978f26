"""What a user watches: one console line a step with a progress bar, ``metrics.jsonl``, wandb, samples of rollouts.

``metrics.jsonl`` is the record: one JSON object a line, no step twice, also after a resume. wandb gets the same numbers.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import ray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from trainer.settings.config import Config
from trainer.settings.redact import redact_text
from trainer.watch import samples
from trainer.watch.events import EventLog
from trainer.watch.gauges import Gauges, endpoint
from trainer.watch.samples import Sample
from trainer.watch.wandb_log import WandbLog, wandb_mode


class Tracker:
    """Everything that is written about a run while it runs."""

    def __init__(self, config: Config, run_dir: Path, tokenizer: Any, step: int = -1, wandb_id: str | None = None) -> None:
        """``step``: the last one that is done, -1 if none is; what an attempt that died wrote of later ones is dropped."""
        self.config, self.run_dir, self.tokenizer = config, run_dir, tokenizer
        self.path = run_dir / "metrics.jsonl"
        logged = _keep_until(self.path, step)
        samples.drop_after(run_dir / "rollouts", step)
        self.file = self.path.open("a")
        self.notes = (run_dir / "logs" / "controller.log").open("a")
        self.events = EventLog(run_dir / "events.jsonl" if config.log.events else None, config.log.events_mb)
        self.console = Console(quiet=not config.log.console)
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal or not config.log.console,
        )
        self.bar = self.progress.add_task(config.name, total=config.steps, completed=max(step, 0))
        mode = wandb_mode(config.log.wandb)
        self.wandb = WandbLog(config, run_dir, wandb_id, logged, mode, self.say) if mode != "disabled" else None
        self.gauges = Gauges(config.name) if ray.is_initialized() else None
        if self.gauges:
            self.note(f"gauges: {endpoint() or 'this node exports none'}")
        self.lateness = Lateness(config)
        self.last_score: tuple[int, float] | None = None
        """A step after which the held-out reward was measured, and its mean over tasks."""
        self.note(f"an attempt begins after step {step}")

    @property
    def wandb_id(self) -> str | None:
        """Id of the wandb run, kept in checkpoints."""
        return self.wandb.id if self.wandb else None

    @property
    def has_steps(self) -> bool:
        """Whether a step is recorded, be it step 0."""
        return has_steps(self.run_dir)

    def say(self, text: str) -> None:
        """A line for the console."""
        self.console.print(redact_text(text), highlight=False, soft_wrap=True, markup=False)

    def note(self, text: str) -> None:
        """A line for ``logs/controller.log`` only."""
        self.notes.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {redact_text(text)}\n")
        self.notes.flush()

    def log(self, step: int, metrics: dict[str, float], sample: Sample | None = None) -> None:
        """Record a step everywhere; numbers that are not finite become null in the file."""
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self.file.write(json.dumps({"step": step, **row}) + "\n")
        self.file.flush()
        rows = self._write_sample(step, sample) if sample is not None else []
        if self.wandb:
            self.wandb.log(step, metrics, rows)
        if self.gauges:
            self.gauges.set(step, metrics)
        rewards = [value for name, value in metrics.items() if name.startswith("eval/") and name.endswith("/reward")]
        if rewards:
            self.last_score = (step, sum(rewards) / len(rewards))
        self.say(console_line(step, self.config.steps, metrics))
        if self.lateness.at_bound(metrics):
            self.say(self.lateness.advice)
        if not self.progress.live.is_started and step < self.config.steps:
            self.progress.start()
        self.progress.update(self.bar, completed=step)

    def _write_sample(self, step: int, sample: Sample) -> list[dict[str, Any]]:
        log = self.config.log
        rows = samples.as_rows(step, sample, self.tokenizer, log.rollouts_tokens)
        samples.write(self.run_dir / "rollouts", step, rows, int(log.rollouts_mb * 2**20))
        return rows

    def close(self) -> None:
        """Flush everything; wandb gets its summary."""
        with contextlib.suppress(Exception):
            self.progress.stop()
        if self.wandb:
            self.wandb.close()
        self.events.close()
        self.file.close()
        self.notes.close()


class Lateness:
    """Whether rollouts are trained on as late as ``max_staleness`` allows, step after step; then they could be fresher.

    With ``admission=fresh`` they only are where the longest hold up their batches. One version is what overlap needs, so with
    ``max_staleness=1`` there is nothing to say.
    """

    STEPS = 10
    """In a row, before a word is said."""

    def __init__(self, config: Config) -> None:
        self._bound, self._steps = config.max_staleness, 0
        room = config.max_staleness * config.batch_size // config.algorithm.rollouts_per_prompt
        self._room = room - config.reorder_window
        late = f"for {self.STEPS} steps all were trained on max_staleness={self._bound} versions late."
        if config.admission == "fresh":
            self.advice = (
                f"Rollouts wait for the longest of their batch: {late} reorder_window={room // 2} (at most {room}) lets "
                "training pass so many and keeps as many fewer in flight, which can cost speed; or lower max_staleness."
            )
        else:
            self.advice = f"Rollouts wait: {late} admission=fresh keeps fewer in flight and trains on fresher ones."

    def at_bound(self, metrics: dict[str, float]) -> bool:
        """Whether ``metrics`` are of the step at which to say so: once in a run."""
        if self._bound < 2 or self._room <= 0 or self._steps >= self.STEPS:
            return False
        self._steps = self._steps + 1 if metrics.get("off_policy/mean", 0.0) >= self._bound else 0
        return self._steps == self.STEPS


def has_steps(run_dir: Path) -> bool:
    """Whether a step of the run is recorded, be it step 0."""
    path = run_dir / "metrics.jsonl"
    return path.exists() and path.stat().st_size > 0


def console_line(step: int, steps: int, metrics: dict[str, float]) -> str:
    """One line about a step: what was measured of the things that matter first."""
    names = {
        "reward/mean": "reward",
        "critic/explained_variance": "ev",
        "rollout_corr/kl": "kl",
        "actor/entropy": "entropy",
        "off_policy/mean": "stale",
        "time/step": "s/step",
    }
    parts = [f"step {step:>{len(str(steps))}}/{steps}"]
    parts += [f"{label} {metrics[name]:.3g}" for name, label in names.items() if name in metrics]
    parts += [f"{name} {value:.3f}" for name, value in metrics.items() if name.startswith("eval/") and name.endswith("/reward")]
    return "  ".join(parts)


def _keep_until(path: Path, step: int) -> int:
    """Drop the lines of steps after ``step``; returns the last step that the file had, -1 if none."""
    if not path.exists():
        return -1
    kept, last = [], -1
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            last = json.loads(line)["step"]
            if last <= step:
                kept.append(line + "\n")
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    os.replace(temporary, path)
    return last
