"""Checkpoints of a whole run: written beside training, so that a half-written one is never mistaken for a good one.

    checkpoints/step_000120.1f3a.tmp/     sessions and random states (by the learner ranks), the controller's files
    checkpoints/step_000120.1f3a.tmp/manifest.json     last: sizes and sha256 of all files, held-out reward
    checkpoints/step_000120/              after the rename
    checkpoints/LATEST                    name of the newest one, replaced last

Whatever else lies there (a copy under another name, a file) is left alone. The name of a temporary directory is used once: a
rank of a killed attempt that is still writing cannot reach the next one's.
See `trainer.run.recovery` for the controller's files. No pickle: safetensors and JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from ray.exceptions import RayActorError

from rlframe.files import Entry, replace, seal, sha256, sync_folder
from trainer.run.failures import CheckpointError
from trainer.settings.sections import CheckpointConfig
from trainer.watch.step_names import is_step_name, step_of

FORMAT = 2
MANIFEST = "manifest.json"
_TEMPORARY = re.compile(r"step_\d{6,}(\.[0-9a-f]{4})?\.tmp")


class Writers(Protocol):
    """What checkpoints need of the learner ranks."""

    async def snapshot(self) -> None:
        """Copy the state to host memory."""

    async def write(self, directory: str) -> dict[str, Entry]:
        """Write the copies; what was written."""
        ...


class Checkpoints:
    """The checkpoints of one run directory. At most one is being written."""

    def __init__(self, run_dir: Path, config: CheckpointConfig) -> None:
        self.root = run_dir / "checkpoints"
        self.config = config
        self.seconds: dict[str, float] = {}
        self._writing: asyncio.Task[None] | None = None

    async def save(self, step: int, learner: Writers, write_rest: Callable[[Path], list[Path]], score: float | None) -> None:
        """Begin the checkpoint of ``step``; returns once later steps cannot change it, while it is written in the background.

        Args:
            step: the step that has just ended.
            learner: writes sessions and random states.
            write_rest: called in a thread with the directory; writes the controller's files and returns their paths. What it
                writes must have been copied.
            score: held-out reward after this step, if it was measured; higher is better.

        Raises:
            CheckpointError: the one before could not be written.
        """
        await self.settle()
        start = time.perf_counter()
        if await asyncio.to_thread(verify, self.root / f"step_{step:06d}") is None:
            return  # a stop right after a checkpoint: nothing was learned since
        for leftover in [path for path in self.root.glob("*.tmp") if _TEMPORARY.fullmatch(path.name)]:
            await asyncio.to_thread(shutil.rmtree, leftover, ignore_errors=True)
        temporary = self.root / f"step_{step:06d}.{secrets.token_hex(2)}.tmp"
        temporary.mkdir(parents=True)
        await learner.snapshot()
        self.seconds["time/checkpoint"] = time.perf_counter() - start
        self._writing = asyncio.create_task(self._write(step, temporary, learner, write_rest, score))

    async def settle(self) -> None:
        """Wait for the checkpoint that is being written, if one is.

        Raises:
            CheckpointError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    async def check(self) -> None:
        """Raise now if the checkpoint in the background has failed; never waits for it."""
        if self._writing is not None and self._writing.done():
            await self.settle()

    def timings(self) -> dict[str, float]:
        """Seconds since the last call: ``time/checkpoint`` (training stood still) and ``time/checkpoint_write`` (beside it)."""
        seconds, self.seconds = self.seconds, {}
        return seconds

    async def _write(
        self, step: int, temporary: Path, learner: Writers, write_rest: Callable[[Path], list[Path]], score: float | None
    ) -> None:
        start = time.perf_counter()
        try:
            files = await learner.write(str(temporary))
            await asyncio.to_thread(self._complete, step, temporary, files, write_rest, score)
        except RayActorError:
            raise
        except Exception as error:
            raise CheckpointError(f"The checkpoint of step {step} could not be written: {error}") from error
        self.seconds["time/checkpoint_write"] = time.perf_counter() - start

    def _complete(
        self,
        step: int,
        temporary: Path,
        files: dict[str, Entry],
        write_rest: Callable[[Path], list[Path]],
        score: float | None,
    ) -> None:
        for name, entry in files.items():
            path = temporary / name
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                raise CheckpointError(f"a learner rank wrote {name}, which is not seen here; run_dir must be on a shared path")
        files |= {str(path.relative_to(temporary)): seal(path) for path in write_rest(temporary)}
        manifest = {"format": FORMAT, "step": step, "score": score, "files": files}
        replace(temporary / MANIFEST, json.dumps(manifest, indent=1))
        final = self.root / f"step_{step:06d}"
        shutil.rmtree(final, ignore_errors=True)  # a damaged one
        temporary.rename(final)
        sync_folder(self.root)
        replace(self.root / "LATEST", final.name + "\n")
        self._prune(step)

    def _prune(self, step: int) -> None:
        """Remove what no rule keeps: the newest, the multiples of ``keep_every``, the best by held-out reward."""
        rules = self.config
        found = [directory for directory in self._newest_first() if step_of(directory) <= step]
        kept = set(found[: rules.keep_last])
        kept |= {directory for directory in found if rules.keep_every and step_of(directory) % rules.keep_every == 0}
        scores = {directory: score for directory in found if (score := _score(directory)) is not None}
        best_first = sorted(scores, key=lambda directory: (scores[directory], step_of(directory)), reverse=True)
        kept |= set(best_first[: rules.keep_best])
        for directory in found:
            if directory not in kept:
                doomed = directory.with_suffix(".tmp")
                os.replace(directory, doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint that verifies (None: there is no complete one at all), and a sentence for each skipped one.

        Raises:
            CheckpointError: there are some, and none verifies.
        """
        skipped: list[str] = []
        for directory in self._newest_first():
            reason = verify(directory)
            if reason is None:
                return directory, skipped
            skipped.append(f"{directory.name} was skipped: {reason}.")
        if skipped:
            raise CheckpointError(f"Nothing to resume from in {self.root}: {' '.join(skipped)}")
        return None, []

    def at(self, step: int) -> Path:
        """The checkpoint of ``step``.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        directory = self.root / f"step_{step:06d}"
        if not directory.is_dir():
            steps = ", ".join(str(step_of(other)) for other in reversed(self._newest_first())) or "none"
            raise CheckpointError(f"There is no checkpoint of step {step} in {self.root}; there are: {steps}.")
        if reason := verify(directory):
            raise CheckpointError(f"{directory} cannot be used: {reason}.")
        return directory

    def _newest_first(self) -> list[Path]:
        found = (path for path in self.root.glob("step_*") if is_step_name(path.name) and path.is_dir())
        return sorted(found, key=step_of, reverse=True)


def verify(directory: Path) -> str | None:
    """Why a checkpoint cannot be used, or None if every file is there with its size and hash."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
    except FileNotFoundError:
        return "it has no manifest"
    except ValueError:
        return "its manifest is not JSON"
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files", {}), dict):
        return "its manifest is not one of a checkpoint"
    if manifest.get("format") != FORMAT:
        return f"its format is {manifest.get('format')}, this version reads {FORMAT}"
    if is_step_name(directory.name) and manifest.get("step") != step_of(directory):
        return f"it is a copy of the checkpoint of step {manifest.get('step')}"
    with ThreadPoolExecutor() as pool:
        faults = pool.map(lambda item: _fault(directory / item[0], item[0], item[1]), manifest["files"].items())
        return next((fault for fault in faults if fault), None)


def _fault(path: Path, name: str, entry: Entry) -> str | None:
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != entry["bytes"]:
        return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
    if sha256(path) != entry["sha256"]:
        return f"{name} does not match its sha256"
    return None


def _score(directory: Path) -> float | None:
    try:
        score: Any = json.loads((directory / MANIFEST).read_text()).get("score")
    except (OSError, ValueError, AttributeError):
        return None
    return score
