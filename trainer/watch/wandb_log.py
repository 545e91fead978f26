"""The wandb run of a job: one for all attempts, every step once, no secrets. Not used where `wandb_mode` is ``disabled``."""

from __future__ import annotations

import fnmatch
import json
import math
import netrc
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlframe.config import ConfigError
from rlframe.files import replace
from trainer.settings.config import Config
from trainer.settings.redact import redact_text, without_secrets

MAX_TEXT = 10_000
"""Characters of one text in the table of rollouts."""
CONNECT_S = 20.0
"""How long wandb's server may take to begin a run, before it is kept on this machine."""
FINISH_S = 300.0
"""How long the upload of what is left may take at the end of a run."""


def wandb_mode(setting: str, environment: Mapping[str, str] = os.environ) -> str:
    """``online``, ``offline`` or ``disabled``: the setting, or where that is ``auto`` WANDB_MODE, else whether there is a key.

    Raises:
        ConfigError: WANDB_MODE is none of wandb's modes.
    """
    if setting != "auto":
        return setting
    wanted = environment.get("WANDB_MODE") or ("online" if _has_key() else "offline")
    modes = {"online": "online", "run": "online", "shared": "online", "offline": "offline", "dryrun": "offline"}
    if wanted not in {*modes, "disabled"}:
        raise ConfigError(f"WANDB_MODE={wanted} is not known; choose one of online, offline, disabled.")
    return modes.get(wanted, wanted)


def id_file(run_dir: Path) -> Path:
    """Where a run directory keeps the id of its wandb run."""
    return run_dir / "wandb" / "run_id"


class WandbLog:
    """An open wandb run; resumed when it has an id already."""

    def __init__(
        self, config: Config, run_dir: Path, run_id: str | None, logged: int, mode: str, say: Callable[[str], None]
    ) -> None:
        """Start the run; without a server that answers, on this machine only.

        Args:
            config: the job.
            run_dir: holds the folder ``wandb``.
            run_id: of the run to resume; None: the one that this directory began (its id is written down before wandb
                hears of it, so that a crash before the first checkpoint loses nothing), or a new one.
            logged: last step that an earlier attempt has logged; -1: none.
            mode: ``online`` or ``offline``.
            say: shows a line to the user.
        """
        begun = id_file(run_dir)
        if run_id is None and begun.exists():
            run_id = begun.read_text().strip()
        goes_on, run_id = run_id is not None, run_id or secrets.token_hex(4)
        begun.parent.mkdir(exist_ok=True)
        replace(begun, run_id + "\n")
        self.run = _begin(config, run_dir, run_id, mode, say)
        self.first = 0 if not goes_on else logged + 1 if self.run.offline else self.run.step
        self.metrics_file = run_dir / "metrics.jsonl"

    @property
    def id(self) -> str:
        """Id of the run, kept in checkpoints."""
        return str(self.run.id)

    def log(self, step: int, metrics: dict[str, float], rows: Sequence[dict[str, Any]] = ()) -> None:
        """Record a step, with a table of the sampled rollouts ``rows`` (see `trainer.watch.samples.as_rows`) if there are any.

        wandb refuses to go back: a step that an attempt which died has sent already keeps that attempt's numbers there, while
        ``metrics.jsonl`` has those of the attempt that continued.
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


def _begin(config: Config, run_dir: Path, run_id: str, mode: str, say: Callable[[str], None]) -> Any:
    """``wandb.init``; offline where it cannot be online."""
    if not os.environ.get("WANDB_MODE", "unset"):
        del os.environ["WANDB_MODE"]  # empty, which wandb itself refuses
    import wandb

    # What wandb records of the machine includes the command line, which must not hold secrets.
    plain = all(redact_text(text) == text for text in sys.argv)
    options: dict[str, Any] = {
        "project": config.log.project,
        "entity": config.log.entity,
        "name": redact_text(config.name),
        "id": run_id,
        "resume": "allow",
        "dir": str(run_dir),
        "config": without_secrets(asdict(config)),
        "allow_val_change": True,
        "settings": wandb.Settings(
            silent=True,
            console="off",
            disable_code=True,
            x_disable_meta=not plain,
            init_timeout=CONNECT_S,
            finish_timeout=FINISH_S,
        ),
    }
    if mode == "online":
        try:
            return wandb.init(mode="online", **options)
        except wandb.Error as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            wandb.teardown()  # its process still holds the id
            say(f"wandb cannot be reached ({reason}); the run is kept offline, for `wandb sync` later.")
    return wandb.init(mode="offline", **options)


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
