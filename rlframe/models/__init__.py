"""Model folders: `resolve_model` turns the model config into a local Hugging Face folder, building it once if needed.

`tiny` and `smollm2` are the builders, `characters` the tiny model's tokenizer, `arithmetic` what it is warmed up on. No
training and no sharding here (`rlframe.sessions`).
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlframe.config import ConfigError, ModelConfig
from rlframe.config.validate import nearest

BUILDERS = {"tiny": "rlframe.models.tiny", "smollm2": "rlframe.models.smollm2"}
"""Builder to module; its ``build(folder, **arguments)`` writes weights, config and tokenizer into an empty folder, its
``VERSION`` changes whenever the result would."""

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json")


def resolve_model(model: ModelConfig, cache_dir: str | os.PathLike[str] | None = None) -> str:
    """Return a local Hugging Face folder (weights, config, tokenizer) for ``model``.

    A built model is kept in ``cache_dir``, by default ``$RLFRAME_CACHE`` or ``~/.cache/rlframe``, under a hash of its build
    arguments. Two processes may build at once: the first rename wins and both return the same folder.

    Raises:
        ConfigError: no such folder, something missing in it, unknown builder or argument; one sentence for the user.
    """
    if (model.builder is None) == (model.path is None):
        raise ConfigError("Set exactly one of model.builder (tiny, smollm2) and model.path (a local Hugging Face folder).")
    if model.path is not None:
        return _checked_folder(Path(os.path.expanduser(model.path)))
    if model.builder not in BUILDERS:
        near = nearest(model.builder, BUILDERS)
        raise ConfigError(f"model.builder={model.builder} is unknown; did you mean {near}?")
    builder = importlib.import_module(BUILDERS[model.builder])
    arguments = {key: model.build[key] for key in sorted(model.build)}
    fingerprint = json.dumps([model.builder, builder.VERSION, arguments], sort_keys=True)
    key = hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
    target = (Path(cache_dir) if cache_dir else default_cache()) / "models" / f"{model.builder}-{key}"
    if not target.is_dir():
        _build_once(builder.build, arguments, target)
    return str(target)


def default_cache() -> Path:
    """``$RLFRAME_CACHE``, else ``~/.cache/rlframe``."""
    return Path(os.environ.get("RLFRAME_CACHE") or "~/.cache/rlframe").expanduser()


def _build_once(build: Callable[..., None], arguments: dict[str, Any], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    unfinished.chmod(0o755)
    try:
        build(unfinished, **arguments)
        try:
            unfinished.rename(target)
        except OSError:
            if not target.is_dir():  # anything but having lost the race
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _checked_folder(folder: Path) -> str:
    if not folder.is_dir():
        raise ConfigError(f"model.path={folder} is not a folder; give a local Hugging Face folder (nothing is downloaded).")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path={folder} has no config.json, so it is not a Hugging Face model folder.")
    if not any(path for pattern in WEIGHTS for path in folder.glob(pattern)):
        raise ConfigError(f"model.path={folder} has no weights (model.safetensors).")
    if not any((folder / name).is_file() for name in TOKENIZER):
        raise ConfigError(f"model.path={folder} has no tokenizer.json; save the model's tokenizer next to its weights.")
    return str(folder.resolve())
