"""Saving a session for recovery and loading it again, on any number of ranks. Safetensors and JSON, nothing pickled.

A directory holds ``session.json`` (what the session is, step count), ``replicated.safetensors`` (adapter factors, value head
and their moments, written by rank 0) and, where parameters are sharded, one ``shard-00000-of-00002.safetensors`` per writing
rank with the rows that it holds. Tensors are called ``weight/<name>``, ``exp_avg/<name>``, ``exp_avg_sq/<name>`` and
``step/<name>``. A parameter that never had a gradient has no moments. Saving is two halves: a snapshot in host memory, which
all ranks take together, and its files, which each rank writes whenever it likes. Folders for other tools are
`rlframe.session_export`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a session in host memory, which no later step changes: what `write` puts into files."""

    files: dict[str, dict[str, Tensor]]
    """Tensors by the name of their file."""
    description: dict[str, Any] | None
    """``session.json``, on rank 0."""

    def write(self, directory: Path) -> list[Path]:
        """Write this rank's files, from any thread, beside whatever the session does meanwhile; returns their paths."""
        directory.mkdir(parents=True, exist_ok=True)
        paths = []
        for name, tensors in self.files.items():
            paths.append(directory / name)
            save_file(tensors, paths[-1])
        if self.description is not None:
            paths.append(directory / "session.json")
            paths[-1].write_text(json.dumps(self.description, indent=2, sort_keys=True))
        return paths


def save(session: Session, directory: Path) -> None:
    """Write a session to a folder; every rank writes its own part."""
    taken = snapshot(session)

    def write() -> None:
        taken.write(directory)

    session.backbone.ranks.together(write)


def snapshot(session: Session) -> Snapshot:
    """Copy a session to host memory, to be written later."""
    ranks = session.backbone.ranks
    sharded = {name for name, parameter in session.named_parameters() if isinstance(parameter, DTensor)}
    tensors = {f"weight/{name}": tensor for name, tensor in _weights(session).items()}
    for t in session.trainables:
        if t.step is None:
            continue
        exp_avg, exp_avg_sq, step = t.moments()
        tensors |= {f"exp_avg/{t.name}": exp_avg, f"exp_avg_sq/{t.name}": exp_avg_sq}
        if ranks.rank == 0:
            tensors[f"step/{t.name}"] = step

    def in_shard(key: str) -> bool:
        kind, _, name = key.partition("/")
        return kind != "step" and name in sharded

    files: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if in_shard(key):
            name = f"shard-{ranks.rank:05d}-of-{ranks.size:05d}.safetensors"
        elif ranks.rank == 0:
            name = "replicated.safetensors"
        else:
            continue
        files.setdefault(name, {})[key] = tensor.detach().to("cpu", copy=True).contiguous()
    if ranks.rank == 0:
        files.setdefault("replicated.safetensors", {})
    description = _description(session)
    return Snapshot(files, description if ranks.rank == 0 else None)


def _description(session: Session) -> dict[str, Any]:
    """What a session is; every rank takes part."""
    frozen_base = session.backbone.bit_sum(torch.float32) if session.spec.kind == "lora" else 0
    return {
        "format": FORMAT,
        "kind": session.spec.kind,
        "steps": session.steps,
        "ranks": session.backbone.ranks.size,
        "parameters": {name: list(p.shape) for name, p in session.named_parameters()},
        "scaling": session.scaling(),
        "base": f"{frozen_base:016x}",
    }


def load(session: Session, directory: Path) -> None:
    """Restore a session from a folder, on any number of ranks."""
    ranks = session.backbone.ranks
    mine = _description(session)
    found: list[tuple[dict[str, Any], _Stored]] = []
    # Nothing is overwritten before every rank has found what it needs.
    ranks.together(lambda: found.append(_open(session, mine, directory)))
    description, stored = found[0]
    ranks.together(lambda: _restore(session, stored))
    session.steps = description["steps"]


def _open(session: Session, mine: dict[str, Any], directory: Path) -> tuple[dict[str, Any], _Stored]:
    description = _read_description(session, mine, directory)
    shards = sorted(directory.glob(f"shard-*-of-{description['ranks']:05d}.safetensors"))
    stored = _Stored(directory / "replicated.safetensors", shards)
    missing = [name for name, _ in session.named_parameters() if f"weight/{name}" not in stored]
    if missing or len(shards) not in (0, description["ranks"]):
        raise ConfigError(f"{directory} is not complete: it has {len(shards)} shard(s) and lacks {missing[:1]}.")
    return description, stored


def _restore(session: Session, stored: _Stored) -> None:
    trainables = {t.name: t for t in session.trainables}
    for name, parameter in session.named_parameters():
        rows = session.backbone.ranks.rows(parameter.shape[0]) if isinstance(parameter, DTensor) else None
        t = trainables.get(name)
        target = t.master if t is not None else local(parameter.detach())
        with torch.no_grad():
            target.copy_(stored.read(f"weight/{name}", rows))
        if t is not None:
            t.publish()
            t.forget()
            if f"step/{name}" in stored:
                _load_moments(t, stored, rows)


def _load_moments(t: Trainable, stored: _Stored, rows: slice | None) -> None:
    exp_avg, exp_avg_sq, step = t.moments()
    exp_avg.copy_(stored.read(f"exp_avg/{t.name}", rows))
    exp_avg_sq.copy_(stored.read(f"exp_avg_sq/{t.name}", rows))
    step.copy_(stored.read(f"step/{t.name}"))


def _read_description(session: Session, mine: dict[str, Any], directory: Path) -> dict[str, Any]:
    path = directory / "session.json"
    if not path.exists():
        raise ConfigError(f"{directory} holds no saved session: session.json is missing.")
    description = json.loads(path.read_text())
    if description["format"] != FORMAT:
        raise ConfigError(f"{path} has format {description['format']}, this version reads format {FORMAT}.")
    for key in ("kind", "parameters", "scaling"):
        if description[key] != mine[key]:
            raise ConfigError(f"{directory} was saved by a session that differs from {session.name!r} in its {key}.")
    if description["base"] != mine["base"]:
        raise ConfigError(f"{directory} was saved over another base model than the one of session {session.name!r}.")
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

    def read(self, key: str, rows: slice | None = None) -> Tensor:
        """A tensor, or the given rows of it; None: all of them, however many ranks wrote them."""
        files = self._where[key]
        if rows is None:
            whole = [file.get_tensor(key) for file in files]
            return whole[0] if len(whole) == 1 else torch.cat(whole)
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
