"""Checkpoints of a whole run: written so that a half-written one is never mistaken for a good one.

    checkpoints/step_000120.tmp/     sessions and random states (by the learner ranks), trainer.json, buffer files
    checkpoints/step_000120.tmp/manifest.json     last: sizes and sha256 of all files, package version, config hash
    checkpoints/step_000120/         after the rename
    checkpoints/LATEST               name of the newest one, replaced last

No pickle: safetensors and JSON. Exports for people are not here; see `Session.export`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load_file, save_file

from rlframe.types import Batch
from trainer.buffer import State
from workers.group import LearnerGroup

if TYPE_CHECKING:
    from trainer.controller import Controller

FORMAT = 1


class CheckpointError(RuntimeError):
    """No checkpoint can be used; the message says why, directory by directory."""


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, run_dir: Path, keep_last: int, config_hash: str) -> None:
        self.root = run_dir / "checkpoints"
        self.keep_last, self.config_hash = keep_last, config_hash

    async def save(self, step: int, learner: LearnerGroup, state: dict[str, Any]) -> None:
        """Write the checkpoint of ``step``: ``state`` (see `snapshot`) here, the sessions by the ranks."""
        final = self.root / f"step_{step:06d}"
        temporary = final.with_suffix(".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        await learner.save(str(temporary))
        _write_state(temporary, state)
        _write_manifest(temporary, step, self.config_hash)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        _replace(self.root / "LATEST", final.name + "\n")
        for old in self._newest_first()[self.keep_last :]:
            shutil.rmtree(old, ignore_errors=True)

    def newest(self) -> tuple[Path, list[str]]:
        """The newest checkpoint that verifies, and a sentence for each one that was skipped.

        Raises:
            CheckpointError: there is none.
        """
        skipped: list[str] = []
        for directory in self._newest_first():
            reason = verify(directory)
            if reason is None:
                return directory, skipped
            skipped.append(f"{directory.name} was skipped: {reason}.")
        detail = " ".join(skipped) or "there is no complete one."
        raise CheckpointError(f"Nothing to resume from in {self.root}: {detail}")

    def _newest_first(self) -> list[Path]:
        return sorted((d for d in self.root.glob("step_*") if d.is_dir() and d.suffix != ".tmp"), reverse=True)


def verify(directory: Path) -> str | None:
    """Why a checkpoint cannot be used, or None if every file is there with its size and hash."""
    try:
        manifest = json.loads((directory / "manifest.json").read_text())
    except FileNotFoundError:
        return "it has no manifest"
    except ValueError:
        return "its manifest is not JSON"
    if manifest.get("format") != FORMAT:
        return f"its format is {manifest.get('format')}, this version reads {FORMAT}"
    for name, entry in manifest["files"].items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
        if _sha256(path) != entry["sha256"]:
            return f"{name} does not match its sha256"
    return None


def snapshot(controller: Controller) -> dict[str, Any]:
    """What the controller needs to go on: counts, data position, baselines, and the slots of the buffer in order."""
    slots = controller.buffer.slots(State.ISSUED, State.FINISHED)
    return {
        "step": controller.step,
        "version": controller.version,
        "position": controller.stream.position,
        "running_mean": controller.running_mean.state_dict(),
        "faults": dict(controller.faults),
        "dropped": controller.buffer.dropped,
        "wandb_id": controller.tracker.wandb_id,
        "slots": [{"index": slot.prompt.index, "finished": slot.state is State.FINISHED} for slot in slots],
        "batches": [slot.result for slot in slots if slot.state is State.FINISHED],
    }


def restore(controller: Controller, directory: Path) -> None:
    """Put `snapshot`'s state back; finished trajectories keep their place, prompts in flight are issued again."""
    state = read_state(directory)
    controller.resumed = True
    controller.step, controller.version = state["step"], state["version"]
    controller.stream.position = state["position"]
    controller.running_mean.load_state_dict(state["running_mean"])
    controller.faults |= state["faults"]
    controller.buffer.dropped = state["dropped"]
    batches = iter(_read_batches(directory))
    for slot in state["slots"]:
        number = controller.buffer.put(controller.stream.prompt(slot["index"]))
        if slot["finished"]:
            controller.buffer.finish(number, next(batches))


def read_state(directory: Path) -> dict[str, Any]:
    """The JSON part of the controller's state."""
    state: dict[str, Any] = json.loads((directory / "trainer.json").read_text())
    return state


def _write_state(directory: Path, state: dict[str, Any]) -> None:
    batches: list[Batch] = state.pop("batches")
    if batches:
        joined = asdict(Batch.concat(batches))
        arrays = {name: value for name, value in joined.items() if isinstance(value, np.ndarray)}
        save_file(arrays, str(directory / "buffer.safetensors"))
        rest = {name: value for name, value in joined.items() if isinstance(value, list)}
        state["buffer"] = rest | {"sizes": [len(batch) for batch in batches]}
    (directory / "trainer.json").write_text(json.dumps(state))


def _read_batches(directory: Path) -> list[Batch]:
    rest = read_state(directory).get("buffer")
    if rest is None:
        return []
    sizes = rest.pop("sizes")
    arrays: dict[str, Any] = load_file(str(directory / "buffer.safetensors"))
    joined = Batch(**arrays, **rest)
    edges = np.concatenate([[0], np.cumsum(sizes)])
    return [joined.select(np.arange(start, end)) for start, end in pairwise(edges)]


def _write_manifest(directory: Path, step: int, config_hash: str) -> None:
    files = {
        str(path.relative_to(directory)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    _replace(
        directory / "manifest.json",
        json.dumps({"format": FORMAT, "step": step, "config_hash": config_hash, "files": files}, indent=1),
    )


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
