"""What the server keeps on disk: runs with their saved weights, models put to sleep, and the sessions of clients.

    runs/<session>_train_<number>/run.json                  who owns the run, what its model is
    runs/.../weights/<name>/, sampler_weights/<name>/       saved weights, each with a checkpoint.json written last
    runs/.../asleep/                                        the whole state of a model that is not in memory
    sessions/<session>.json                                 sessions and their samplers

JSON and safetensors only. Everything is written beside its place and renamed, so that nothing half-written has a name.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainer.server import paths
from trainer.server.errors import UserError, not_found
from trainer.server.paths import WeightsPath

EPHEMERAL = "live-"
"""How names of sampler weights begin that the client did not name."""
EPHEMERAL_KEPT = 32
"""Of these, how many of a model are kept; the SDK never says when it is done with one."""


@dataclass
class ModelInfo:
    """What a model is; enough to make its session again."""

    id: str
    user: str
    session: str
    base_model: str
    rank: int
    alpha: float
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    frozen_patterns: list[str] = field(default_factory=list)
    value_head: bool = False
    user_metadata: dict[str, Any] | None = None


@dataclass
class Checkpoint:
    """Saved weights."""

    path: str
    """``tinker://...``"""
    key: str
    """Unique forever."""
    created: float
    """Seconds since 1970."""
    size_bytes: int
    model: ModelInfo
    """The model as it was."""
    expires: float | None = None
    user_metadata: dict[str, str] | None = None

    @property
    def expired(self) -> bool:
        """Whether it has expired."""
        return self.expires is not None and time.time() > self.expires


class Store:
    """The folder of one server."""

    def __init__(self, folder: Path) -> None:
        self._runs, self._sessions = folder / "runs", folder / "sessions"
        for part in (self._runs, self._sessions):
            part.mkdir(parents=True, exist_ok=True)

    def save_run(self, info: ModelInfo) -> None:
        """Save the description of a model."""
        folder = self._run(info.id)
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(folder / "run.json", asdict(info))

    def run(self, id: str, user: str) -> ModelInfo:
        """The run of ``user``.

        Raises:
            UserError: (404) this user has no such run.
        """
        info = self._read_run(self._run(paths.check_run(id)))
        if info is None or info.user != user:
            raise not_found(f"model {id!r}")
        return info

    def runs(self, user: str) -> list[ModelInfo]:
        """All runs of ``user``, oldest first."""
        found = [info for folder in self._runs.iterdir() if (info := self._read_run(folder)) and info.user == user]
        return sorted(found, key=self.written)

    def written(self, run: ModelInfo) -> float:
        """When a run was first saved, seconds since 1970."""
        return (self._run(run.id) / "run.json").stat().st_mtime

    def _read_run(self, folder: Path) -> ModelInfo | None:
        path = folder / "run.json"
        return ModelInfo(**json.loads(path.read_text())) if path.exists() else None

    def _run(self, id: str) -> Path:
        return self._runs / paths.check_run(id).replace(":", "_")

    def asleep(self, id: str) -> Path:
        """Where the state of a model lies while it is not in memory."""
        return self._run(id) / "asleep"

    def folder(self, path: WeightsPath) -> Path:
        """The folder of saved weights, whether it exists or not."""
        return self._run(path.run) / path.kind / path.name

    def begin(self, path: WeightsPath, overwrite: bool) -> Path:
        """A folder to write new weights into; `commit` gives it its name.

        Raises:
            UserError: the name is taken.
        """
        if self.folder(path).exists() and not overwrite:
            raise UserError(f"path={path.name!r} is taken in this run; choose another name, or pass overwrite=True.")
        return begin(self.folder(path))

    def commit(self, path: WeightsPath, written: Path, model: ModelInfo, **about: Any) -> Checkpoint:
        """Complete what `begin` started; ``about``: expires, user_metadata."""
        size = sum(file.stat().st_size for file in written.rglob("*") if file.is_file())
        checkpoint = Checkpoint(str(path), uuid.uuid4().hex, time.time(), size, model, **about)
        _write_json(written / "checkpoint.json", asdict(checkpoint))
        commit(written, self.folder(path))
        return checkpoint

    def find(self, path: WeightsPath, user: str) -> Checkpoint:
        """Saved weights of ``user``.

        Raises:
            UserError: (404) this user has none under that path.
        """
        found = self._read(self.folder(path))
        if found is None or found.model.user != user or found.expired:
            raise not_found(f"saved weights {str(path)!r}")
        return found

    def update(self, checkpoint: Checkpoint) -> None:
        """Save the changed description of saved weights."""
        _write_json(self.folder(paths.parse(checkpoint.path)) / "checkpoint.json", asdict(checkpoint))

    def checkpoints(self, run: ModelInfo) -> list[Checkpoint]:
        """Everything saved of a run, oldest first."""
        folders = [folder for kind in paths.KINDS for folder in (self._run(run.id) / kind).glob("*")]
        found = [checkpoint for folder in folders if (checkpoint := self._read(folder)) and not checkpoint.expired]
        return sorted(found, key=lambda checkpoint: checkpoint.created)

    def hide(self, checkpoint: Checkpoint) -> None:
        """Make saved weights unfindable; readers that have found them can still read them."""
        (self.folder(paths.parse(checkpoint.path)) / "checkpoint.json").unlink(missing_ok=True)

    def delete(self, checkpoint: Checkpoint) -> None:
        """Remove saved weights."""
        folder = self.folder(paths.parse(checkpoint.path))
        gone = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
        folder.rename(gone)
        shutil.rmtree(gone)

    def expired(self) -> list[Checkpoint]:
        """Expired weights."""
        folders = [folder for kind in paths.KINDS for folder in self._runs.glob(f"*/{kind}/*")]
        return [found for folder in folders if (found := self._read(folder)) and found.expired]

    def _read(self, folder: Path) -> Checkpoint | None:
        path = folder / "checkpoint.json"
        if folder.name.startswith(".") or not path.exists():
            return None
        read = json.loads(path.read_text())
        return Checkpoint(**{**read, "model": ModelInfo(**read["model"])})

    def save_session(self, id: str, content: dict[str, Any]) -> None:
        """Save a client's session."""
        _write_json(self._sessions / f"{id}.json", content)

    def sessions(self) -> Iterator[dict[str, Any]]:
        """All saved sessions."""
        for path in sorted(self._sessions.glob("*.json")):
            yield json.loads(path.read_text())


def begin(folder: Path) -> Path:
    """A new folder beside ``folder`` to write into."""
    written = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    written.mkdir(parents=True)
    return written


def commit(written: Path, folder: Path) -> None:
    """Rename what `begin` made to its final name, replacing what has it."""
    old = folder.with_name(f".{folder.name}.old-{uuid.uuid4().hex[:8]}")
    if folder.exists():
        folder.rename(old)
    written.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _write_json(path: Path, content: Any) -> None:
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    unfinished.write_text(json.dumps(content, indent=1, sort_keys=True))
    os.replace(unfinished, path)


def iso(seconds: float) -> str:
    """A time as the SDK reads it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()
