"""The wandb run of a job: one for all attempts, every step once, no secrets. Not used with ``log.wandb=disabled``."""

from __future__ import annotations

import fnmatch
import json
import math
import netrc
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlframe.config import Config
from rlframe.files import replace
from trainer.redact import redact_text, without_secrets

MAX_TEXT = 10_000
"""Characters of one text in the table of rollouts."""


def id_file(run_dir: Path) -> Path:
    """Where a run directory keeps the id of its wandb run."""
    return run_dir / "wandb" / "run_id"


class WandbLog:
    """An open wandb run; resumed when it has an id already."""

    def __init__(self, config: Config, run_dir: Path, run_id: str | None, logged: int) -> None:
        """Start the run.

        Args:
            config: the job; ``log.wandb`` is not ``disabled``.
            run_dir: holds the folder ``wandb``.
            run_id: of the run to go on with; None: the one that this directory began (its id is written down before wandb
                hears of it, so that a crash before the first checkpoint loses nothing), or a new one.
            logged: last step that an earlier attempt has logged; -1: none.
        """
        import wandb

        begun = id_file(run_dir)
        if run_id is None and begun.exists():
            run_id = begun.read_text().strip()
        goes_on, run_id = run_id is not None, run_id or secrets.token_hex(4)
        begun.parent.mkdir(exist_ok=True)
        replace(begun, run_id + "\n")
        mode: Any = config.log.wandb
        if mode == "auto":
            mode = "online" if _has_key() else "offline"
        # What wandb records of the machine includes the command line, which must not hold secrets.
        plain = all(redact_text(text) == text for text in sys.argv)
        self.run = wandb.init(
            project=config.log.project,
            entity=config.log.entity,
            name=config.name,
            id=run_id,
            resume="allow",
            mode=mode,
            dir=str(run_dir),
            config=without_secrets(asdict(config)),
            allow_val_change=True,
            settings=wandb.Settings(silent=True, console="off", disable_code=True, x_disable_meta=not plain),
        )
        self.first = 0 if not goes_on else logged + 1 if mode == "offline" else self.run.step
        self.metrics_file = run_dir / "metrics.jsonl"

    @property
    def id(self) -> str:
        """Id of the run, kept in checkpoints."""
        return str(self.run.id)

    def log(self, step: int, metrics: dict[str, float], rows: Sequence[dict[str, Any]] = ()) -> None:
        """Record a step, with a table of the sampled rollouts ``rows`` (see `trainer.samples.as_rows`) if there are any.

        wandb refuses to go back: a step that an attempt which died has sent already keeps that attempt's numbers there, while
        ``metrics.jsonl`` has those of the attempt that went on.
        """
        if step < self.first:
            return
        values: dict[str, Any] = dict(metrics)
        if rows:
            values["rollouts"] = table(rows)
        self.run.log(values, step=step, commit=True)

    def close(self) -> None:
        """Write the summary and end the run; as failed when an exception is on its way."""
        steps = [json.loads(line) for line in self.metrics_file.read_text().splitlines()]
        for name in {name for row in steps for name in row if fnmatch.fnmatch(name, "eval/*/reward")}:
            values = [row[name] for row in steps if row.get(name) is not None]
            self.run.summary.update({name: values[-1], f"{name}/best": max(values)} if values else {})
        self.run.summary["steps"] = steps[-1]["step"] if steps else 0
        self.run.finish(exit_code=int(sys.exc_info()[0] is not None))


def table(rows: Sequence[dict[str, Any]]) -> Any:
    """Sampled rollouts as a ``wandb.Table``; means are over sampled tokens."""
    import wandb

    columns: list[Any] = [
        "step",
        "prompt id",
        "prompt",
        "response",
        "reward",
        "finish",
        "oldest version",
        "advantage",
        "value",
        "ratio",
        "reward extra",
    ]
    data: list[Any] = [
        [
            row["step"],
            row["prompt_id"],
            row["prompt"][:MAX_TEXT],
            row["response"][:MAX_TEXT],
            row["reward"],
            row["finish"],
            row["versions"][0] if row["versions"] else None,
            *(_mean(row["tokens"].get(name)) for name in ("advantage", "value", "ratio")),
            json.dumps(row.get("reward_extra", {})),
        ]
        for row in rows
    ]
    return wandb.Table(columns=columns, data=data)


def _mean(column: Sequence[float | None] | None) -> float | None:
    values = [x for x in column or () if x is not None]
    return math.fsum(values) / len(values) if values else None


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].rstrip("/")
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
