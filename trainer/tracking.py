"""What a user watches: one console line a step with a progress bar, ``metrics.jsonl``, wandb, samples of rollouts.

``metrics.jsonl`` is the record: one JSON object a line, no step twice, also after a resume. wandb gets the same numbers.
"""

from __future__ import annotations

import contextlib
import json
import math
import netrc
import os
import secrets
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rlframe.config import Config
from rlframe.files import replace
from trainer import samples
from trainer.samples import Sample


class Tracker:
    """Everything that is written about a run while it runs."""

    def __init__(
        self, config: Config, run_dir: Path, tokenizer: Any, step: int | None = None, wandb_id: str | None = None
    ) -> None:
        """``step``: the step resumed from (None: none); what an attempt that died wrote of later steps is dropped."""
        self.config, self.run_dir, self.tokenizer = config, run_dir, tokenizer
        self.path = run_dir / "metrics.jsonl"
        _keep_until(run_dir, -1 if step is None else step)
        self.file = self.path.open("a")
        self.notes = (run_dir / "logs" / "controller.log").open("a")
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
        self.bar = self.progress.add_task(config.name, total=config.steps, completed=step or 0)
        self.wandb = _start_wandb(config, run_dir, wandb_id)
        self.last_eval: dict[str, float] = {}
        self.last_eval_step = -1

    @property
    def wandb_id(self) -> str | None:
        """Id of the wandb run, kept in checkpoints."""
        return self.wandb.id if self.wandb else None

    def say(self, text: str) -> None:
        """A line for the console."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """A line for ``logs/controller.log`` only."""
        self.notes.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}\n")
        self.notes.flush()

    def log(self, step: int, metrics: dict[str, float], sample: Sample | None = None) -> None:
        """Record a step everywhere; numbers that are not finite become null in the file."""
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self.file.write(json.dumps({"step": step, **row}) + "\n")
        self.file.flush()
        if self.wandb:
            self.wandb.log(metrics, step=step)
        rewards = {name: value for name, value in metrics.items() if name.startswith("eval/") and name.endswith("/reward")}
        if rewards:
            self.last_eval, self.last_eval_step = self.last_eval | rewards, step
        self.say(console_line(step, self.config.steps, metrics))
        if not self.progress.live.is_started and step < self.config.steps:
            self.progress.start()
        self.progress.update(self.bar, completed=step)
        if sample is not None:
            self._write_sample(step, sample)

    def score(self, step: int) -> float | None:
        """Held-out reward after ``step`` (the mean over tasks), if it was measured then."""
        measured = self.last_eval and self.last_eval_step == step
        return sum(self.last_eval.values()) / len(self.last_eval) if measured else None

    def _write_sample(self, step: int, sample: Sample) -> None:
        log = self.config.log
        rows = samples.as_rows(step, sample, self.tokenizer, log.rollouts_tokens)
        samples.write(self.run_dir / "rollouts", step, rows, int(log.rollouts_mb * 2**20))

    def close(self) -> None:
        """Flush everything; wandb gets the last evaluation as its summary."""
        with contextlib.suppress(Exception):
            self.progress.stop()
        if self.wandb:
            self.wandb.summary.update(self.last_eval)
            self.wandb.finish()
        self.file.close()
        self.notes.close()


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


def _keep_until(run_dir: Path, step: int) -> None:
    """Drop what was recorded of steps after ``step``, and a line that was cut off: they will be done again."""
    samples.drop_after(run_dir / "rollouts", step)
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
    replace(path, "".join(kept))


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].rstrip("/")
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _start_wandb(config: Config, run_dir: Path, run_id: str | None) -> Any:
    mode: Any = config.log.wandb
    if mode == "disabled":
        return None
    import wandb

    if mode == "auto":
        mode = "online" if _has_wandb_key() else "offline"
    return wandb.init(
        project=config.log.project,
        entity=config.log.entity,
        name=config.name,
        id=run_id or secrets.token_hex(4),
        resume="allow",
        mode=mode,
        dir=str(run_dir),
        config=asdict(config),
        settings=wandb.Settings(silent=True, console="off"),
    )
