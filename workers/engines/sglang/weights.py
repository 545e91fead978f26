"""Weight updates for an SGLang server: checked against the checkpoint, then written to a folder that it loads from.

SGLang ignores tensors whose names it does not know and, after a failed load, tries the same folder again: an update has to be
validated before SGLang sees it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from rlframe.hf_checkpoint import weight_files
from workers.engines.protocol import WeightUpdate
from workers.engines.weights import to_torch

MEMORY = Path("/dev/shm")
"""Files here never touch a disk."""
TIED_HEAD = "lm_head.weight"
"""A name that checkpoints with tied embeddings may have or not; the embedding decides."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


@lru_cache(maxsize=4)
def checkpoint_shapes(model_path: str) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Hugging Face folder and its shape."""
    files = weight_files(Path(model_path))
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(set(files.values())):
        with safe_open(file, framework="pt") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118  # no mapping
    return shapes


def check_update(update: WeightUpdate, model_path: str, *, tied: bool) -> None:
    """Refuse an update that does not fit the checkpoint in ``model_path``.

    Raises:
        ValueError: a tensor is missing, unknown or of the wrong shape, or an adapter comes without its configuration.
    """
    if update.mode == "adapter":
        _check_adapter(update, model_path)
        return
    held = dict(checkpoint_shapes(model_path))
    sent = {name: array.shape for name, array in update.tensors.items()}
    if tied:
        held.pop(TIED_HEAD, None)
        sent.pop(TIED_HEAD, None)
    unknown = sorted(sent.keys() - held.keys())
    missing = sorted(held.keys() - sent.keys()) if update.mode == "full" else []
    if unknown or missing:
        raise ValueError(f"The weight update does not fit the engine's model: unknown {unknown[:3]}, missing {missing[:3]}.")
    for name, shape in sent.items():
        if shape != held[name]:
            raise ValueError(f"The weight update has {name} as {shape}, the engine holds {held[name]}.")


def _check_adapter(update: WeightUpdate, model_path: str) -> None:
    if update.adapter is None:
        raise ValueError("An adapter update needs the PEFT configuration in `adapter`.")
    held = checkpoint_shapes(model_path)
    modules = {name: name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in update.tensors}
    if unknown := sorted(name for name, module in modules.items() if f"{module}.weight" not in held):
        raise ValueError(f"The adapter has tensors for modules that the engine does not have: {unknown[:3]}.")


@contextmanager
def weights_folder(update: WeightUpdate, parent: str | None) -> Iterator[str]:
    """A folder with the update as a checkpoint or, for ``adapter``, as PEFT saves one; gone afterwards.

    Args:
        update: tensors and their dtype.
        parent: where to make the folder; None: in this machine's memory where there is room, else among temporary files.
    """
    if parent is None and MEMORY.is_dir():
        size = sum(array.nbytes for array in update.tensors.values())
        parent = str(MEMORY) if shutil.disk_usage(MEMORY).free > 2 * size else None
    with tempfile.TemporaryDirectory(prefix="rlframe-weights-", dir=parent) as folder:
        config, weights = ADAPTER_FILES if update.mode == "adapter" else (None, "model.safetensors")
        tensors = {name: to_torch(array, update.dtype) for name, array in update.tensors.items()}
        save_file(tensors, str(Path(folder, weights)), {"format": "pt"})
        if config is not None:
            Path(folder, config).write_text(json.dumps({"peft_type": "LORA"} | (update.adapter or {}), default=str))
        yield folder
