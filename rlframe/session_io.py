"""Saving a session for recovery and loading it again, on any number of ranks. Safetensors and JSON, nothing pickled.

A directory holds ``session.json`` (what the session is, step count), ``replicated.safetensors`` (adapter factors, value head
and their moments, written by rank 0) and, where parameters are sharded, one ``shard-00000-of-00002.safetensors`` per writing
rank with the rows that it holds. Tensors are called ``weight/<name>``, ``exp_avg/<name>``, ``exp_avg_sq/<name>`` and
``step/<name>``. A parameter that never had a gradient has no moments. Folders for other tools are `rlframe.session_export`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlframe.config import ConfigError
from rlframe.optim import Trainable, local

if TYPE_CHECKING:
    from rlframe.sessions import Session

FORMAT = 1


def _weights(session: Session) -> dict[str, Tensor]:
    """All parameters of the session, frozen ones included: this rank's part of the float32 masters."""
    masters = {t.name: t.master for t in session.trainables}
    return {name: masters.get(name, local(p.detach())) for name, p in session.named_parameters()}


def save(session: Session, directory: Path) -> None:
    """See `Session.save`."""
    session.backbone.ranks.together(lambda: _save(session, directory))


def _save(session: Session, directory: Path) -> None:
    ranks = session.backbone.ranks
    sharded = {name for name, parameter in session.named_parameters() if isinstance(parameter, DTensor)}
    tensors = {f"weight/{name}": tensor for name, tensor in _weights(session).items()}
    stepped = [t for t in session.trainables if t.step is not None]
    for t in stepped:
        exp_avg, exp_avg_sq, step = t.moments()
        tensors |= {f"exp_avg/{t.name}": exp_avg, f"exp_avg_sq/{t.name}": exp_avg_sq}
        if ranks.rank == 0:
            tensors[f"step/{t.name}"] = step
    directory.mkdir(parents=True, exist_ok=True)

    def in_shard(key: str) -> bool:
        kind, _, name = key.partition("/")
        return kind != "step" and name in sharded

    if sharded:
        path = directory / f"shard-{ranks.rank:05d}-of-{ranks.size:05d}.safetensors"
        save_file({key: t.cpu().contiguous() for key, t in tensors.items() if in_shard(key)}, path)
    if ranks.rank == 0:
        whole = {key: t.cpu().contiguous() for key, t in tensors.items() if not in_shard(key)}
        save_file(whole, directory / "replicated.safetensors")
        (directory / "session.json").write_text(json.dumps(_description(session), indent=2, sort_keys=True))


def _description(session: Session) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "kind": session.spec.kind,
        "steps": session.steps,
        "ranks": session.backbone.ranks.size,
        "parameters": {name: list(p.shape) for name, p in session.named_parameters()},
        "scaling": session.scaling(),
    }


def load(session: Session, directory: Path) -> None:
    """See `Session.load`."""
    ranks = session.backbone.ranks
    found: list[tuple[dict[str, Any], _Stored]] = []
    # Nothing is overwritten before every rank has found what it needs.
    ranks.together(lambda: found.append(_open(session, directory)))
    description, stored = found[0]
    ranks.together(lambda: _restore(session, stored))
    session.steps = description["steps"]


def _open(session: Session, directory: Path) -> tuple[dict[str, Any], _Stored]:
    description = _read_description(session, directory)
    shards = sorted(directory.glob(f"shard-*-of-{description['ranks']:05d}.safetensors"))
    stored = _Stored(directory / "replicated.safetensors", shards)
    missing = [name for name, _ in session.named_parameters() if f"weight/{name}" not in stored]
    if missing or len(shards) not in (0, description["ranks"]):
        raise ConfigError(f"{directory} is not complete: it has {len(shards)} shard(s) and lacks {missing[:1]}.")
    return description, stored


def _restore(session: Session, stored: _Stored) -> None:
    trainables = {t.name: t for t in session.trainables}
    for name, parameter in session.named_parameters():
        rows = session.backbone.ranks.rows(parameter.shape[0]) if isinstance(parameter, DTensor) else slice(None)
        t = trainables.get(name)
        target = t.master if t is not None else local(parameter.detach())
        with torch.no_grad():
            target.copy_(stored.read(f"weight/{name}", rows))
        if t is not None:
            t.publish()
            t.forget()
            if f"step/{name}" in stored:
                _load_moments(t, stored, rows)


def _load_moments(t: Trainable, stored: _Stored, rows: slice) -> None:
    exp_avg, exp_avg_sq, step = t.moments()
    exp_avg.copy_(stored.read(f"exp_avg/{t.name}", rows))
    exp_avg_sq.copy_(stored.read(f"exp_avg_sq/{t.name}", rows))
    step.copy_(stored.read(f"step/{t.name}", slice(None)))


def _read_description(session: Session, directory: Path) -> dict[str, Any]:
    path = directory / "session.json"
    if not path.exists():
        raise ConfigError(f"{directory} holds no saved session: session.json is missing.")
    description = json.loads(path.read_text())
    if description["format"] != FORMAT:
        raise ConfigError(f"{path} has format {description['format']}, this version reads format {FORMAT}.")
    mine = _description(session)
    for key in ("kind", "parameters", "scaling"):
        if description[key] != mine[key]:
            raise ConfigError(f"{directory} was saved by a session that differs from {session.name!r} in its {key}.")
    return description


class _Stored:
    """Tensors of one saved session; sharded ones are put together row by row, only the rows that are asked for."""

    def __init__(self, replicated: Path, shards: list[Path]) -> None:
        self._files = [safe_open(path, framework="pt") for path in (replicated, *shards)]
        self._where: dict[str, list[Any]] = {}
        for file in self._files:
            for key in file.keys():  # noqa: SIM118 (not a dictionary)
                self._where.setdefault(key, []).append(file)

    def __contains__(self, key: str) -> bool:
        return key in self._where

    def read(self, key: str, rows: slice) -> Tensor:
        files = self._where[key]
        if rows == slice(None) and len(files) == 1:
            return files[0].get_tensor(key)
        parts: list[Tensor] = []
        first = 0
        for file in files:
            part = file.get_slice(key)
            count = part.get_shape()[0]
            start, stop = max(rows.start - first, 0), min(rows.stop - first, count)
            if start < stop:
                parts.append(part[start:stop])
            first += count
        return torch.cat(parts) if parts else files[0].get_tensor(key)[:0]
