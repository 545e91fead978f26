"""From a checkpoint to a folder for other tools: a PEFT adapter, or a whole Hugging Face model. Starts no Ray.

The value head and the critics are not exported. See `rlframe.session_export` for how folders are written.
"""

from __future__ import annotations

from pathlib import Path

import torch

from rlframe.backbone import Backbone
from rlframe.config import ConfigError
from rlframe.models import resolve_model
from rlframe.sessions import SessionSpec
from trainer.run.checkpoints import Checkpoints
from trainer.run.failures import CheckpointError
from trainer.settings.compose import load_yaml
from trainer.settings.sections import CheckpointConfig


def export(run: str, step: int | None = None, merged: bool = False, output: str | None = None) -> Path:
    """Write the policy of a run; returns the new folder.

    Args:
        run: run directory.
        step: of which checkpoint; None: the newest good one.
        merged: the base model with the adapter added instead of the adapter alone. A policy whose weights all train is
            always written whole.
        output: new folder; None: ``export/step_000120`` (``-merged``) in the run directory.

    Raises:
        ConfigError: there is no such run, or the folder exists.
        CheckpointError: the checkpoint is missing or damaged.
    """
    run_dir = Path(run)
    if not (run_dir / "checkpoints").is_dir():
        raise ConfigError(f"{run} is not a run directory: it has no checkpoints.")
    checkpoints = Checkpoints(run_dir, CheckpointConfig())
    checkpoint = checkpoints.newest()[0] if step is None else checkpoints.at(step)
    if checkpoint is None:
        raise CheckpointError(f"{run} has no checkpoint to export.")
    config = load_yaml(checkpoint / "config.yaml")
    merged = merged or config.actor.mode == "full"
    folder = Path(output) if output else run_dir / "export" / f"{checkpoint.name}{'-merged' if merged else ''}"
    if folder.exists():
        raise ConfigError(f"{folder} exists already; remove it, or give another folder with --output.")
    full = config.actor.mode == "full"
    backbone = Backbone.load(
        resolve_model(config.model),
        mesh=None,
        device=torch.device("cpu"),
        dtype="float32" if full else config.model.dtype,
        trainable=full,
        trust_remote_code=config.model.trust_remote_code,
    )
    session = backbone.create_session("actor", SessionSpec(kind=config.actor.mode, lora=None if full else config.actor.lora))
    session.load(str(checkpoint / "actor"))
    session.export(str(folder), merged=merged)
    return folder
