"""Hugging Face folders: reading weights row by row into sharded parameters, and writing them back in the folder's own names.

A checkpoint may store tensors under other names and cuts than the module has them (experts apart, for one); transformers'
conversion table translates both ways. No rank ever holds more than one parameter beyond its own shard while reading, and one
decoder block while writing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from rlframe.config import ConfigError
from rlframe.optim import local
from rlframe.ranks import Ranks

_WEIGHT_FILES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
)
_SHARD_BYTES = 4 * 2**30


@dataclass
class _Source:
    """Where one module tensor comes from: checkpoint keys, and the converter that joins them (None: renamed at most)."""

    keys: list[str] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)
    converter: WeightConverter | None = None


def weight_files(folder: Path) -> dict[str, Path]:
    """Every tensor name of a folder and the safetensors file it is in.

    Raises:
        ConfigError: the folder has no safetensors weights.
    """
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return {key: folder / name for key, name in json.loads(index.read_text())["weight_map"].items()}
    single = folder / "model.safetensors"
    if single.exists():
        files = [single]
    if len(files) != 1:
        raise ConfigError(
            f"{folder} has no safetensors weights (model.safetensors, or shards with an index); convert it first."
        )
    with safe_open(files[0], framework="pt") as opened:
        return dict.fromkeys(opened.keys(), files[0])


def read_tensors(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Those of the tensors ``names`` that a folder has, in its dtypes."""
    files, found = weight_files(folder), {}
    for name in names:
        if name in files:
            with safe_open(files[name], framework="pt") as opened:
                found[name] = opened.get_tensor(name)
    return found


def load_weights(model: PreTrainedModel, folder: Path, ranks: Ranks) -> None:
    """Fill the materialised parameters and persistent buffers of ``model`` from a folder.

    Raises:
        ConfigError: a tensor is missing or has another shape.
    """
    targets = model.state_dict(keep_vars=True)
    files = weight_files(folder)
    opened: dict[Path, Any] = {}

    def read(key: str) -> Any:
        path = files[key]
        if path not in opened:
            opened[path] = safe_open(path, framework="pt").__enter__()
        return opened[path].get_slice(key)

    try:
        sources = _sources(model, list(files), targets)
        filled = set()
        for name, source in sources.items():
            for target, tensor in _read_target(model, name, source, read):
                _fill(target, targets[target], tensor, ranks)
                filled.add(id(targets[target]))
    finally:
        for handle in opened.values():
            handle.__exit__(None, None, None)
    missing = [name for name, tensor in targets.items() if id(tensor) not in filled]
    if missing:
        raise ConfigError(f"{folder} lacks {len(missing)} tensor(s) of {type(model).__name__}, the first is {missing[0]!r}.")


def _sources(model: PreTrainedModel, keys: list[str], targets: dict[str, Tensor]) -> dict[str, _Source]:
    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    sources: dict[str, _Source] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, targets)
        if name not in targets:  # a rule for one tensor may hit the name of another, which needed none
            name, pattern = key, None
        if name not in targets:
            continue
        source = sources.setdefault(name, _Source())
        source.keys.append(key)
        source.patterns.append(pattern or key)
        if pattern is not None:
            source.converter = by_pattern[pattern]
    return sources


def _read_target(model: PreTrainedModel, name: str, source: _Source, read: Any) -> Iterator[tuple[str, Any]]:
    if source.converter is None:
        yield name, read(source.keys[-1])
        return
    converter = deepcopy(source.converter)
    for key, pattern in zip(source.keys, source.patterns, strict=True):
        converter.add_tensor(name, key, pattern, read(key)[:])
    for target, tensor in converter.convert(name, model=model, config=model.config).items():
        yield target, tensor[0] if isinstance(tensor, list) else tensor


@torch.no_grad()
def _fill(name: str, target: Tensor, source: Any, ranks: Ranks) -> None:
    shape = tuple(source.shape if isinstance(source, Tensor) else source.get_shape())
    if shape != tuple(target.shape):
        raise ConfigError(f"{name} has shape {shape} in the checkpoint and {tuple(target.shape)} in the model.")
    rows = ranks.rows(shape[0]) if isinstance(target, DTensor) else slice(None)
    if isinstance(target, DTensor) and rows.start == rows.stop:
        return
    local(target).copy_(source[rows] if shape else source[...])


def conversions(model: PreTrainedModel) -> list[Any]:
    """The table that brings module tensors back to checkpoint names; empty when both agree. Ask before adapters go in."""
    return [entry for entry in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(entry, PrefixChange)]


def to_checkpoint_names(model: PreTrainedModel, table: list[Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename and re-cut whole module tensors as the checkpoint stores them; all pieces of one fused tensor must be present."""
    if not table:
        return tensors
    model._weight_conversions = table  # type: ignore[assignment]  # where transformers keeps the table of a loaded model
    return revert_weight_conversion(model, tensors)


def to_module_names(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The other way: tensors as the checkpoint stores them, renamed and joined as the modules of ``model`` hold them.

    Raises:
        ValueError: a tensor is none of this model's.
    """
    sources = _sources(model, list(tensors), model.state_dict(keep_vars=True))
    if unknown := sorted(tensors.keys() - {key for source in sources.values() for key in source.keys}):
        raise ValueError(f"The weight update does not fit the engine's model: unknown {unknown[:3]}.")
    return {
        target: tensor
        for name, source in sources.items()
        for target, tensor in _read_target(model, name, source, tensors.__getitem__)
    }


def write_folder(source: Path, destination: Path, groups: Iterable[dict[str, Tensor]]) -> None:
    """Write a Hugging Face folder: the source folder's config and tokenizer, and the given weights.

    Args:
        source: folder whose other files are copied.
        destination: new folder, made if missing.
        groups: CPU tensors under checkpoint names, a few at a time.
    """
    destination.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHT_FILES):
            shutil.copyfile(path, destination / path.name)
    parts: list[tuple[Path, list[str]]] = []
    held: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        path = destination / f"part-{len(parts):05d}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, path, metadata={"format": "pt"})
        parts.append((path, list(held)))
        held.clear()

    for group in groups:
        for name, tensor in group.items():
            if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > _SHARD_BYTES:
                flush()
            held[name] = tensor
            total += tensor.nbytes
    flush()
    if len(parts) == 1:
        parts[0][0].rename(destination / "model.safetensors")
        return
    weight_map = {}
    for i, (path, names) in enumerate(parts):
        final = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        path.rename(destination / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (destination / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
