"""A training job that dies by SIGKILL at an exact point of its code, and what must hold after it was resumed to its end.

The job is `local.run` in a process of its own: controller, learner rank and rollout worker die together, as when a machine
loses power. A point is a call of a function, so nothing here depends on time. `kill_anywhere` does it from outside, with Ray.
"""

import importlib
import json
import multiprocessing
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from tests.support.local_run import run
from trainer.run.checkpoints import Checkpoints
from trainer.run.recovery import read_batches
from trainer.settings.sections import CheckpointConfig

TIMES = ("time/", "perf/", "idle/", "controller/")


@dataclass(frozen=True)
class Point:
    """The ``nth`` call (from 1) of ``function`` in ``module``: the process gets ``signal`` instead of it, or after it."""

    module: str
    function: str
    nth: int = 1
    after: bool = False
    number: int = signal.SIGKILL


IN_A_STEP = [
    ("workers.learner.rank", "LearnerRank.values"),
    ("workers.learner.rank", "LearnerRank.update_critic"),
    ("workers.learner.rank", "LearnerRank.update_actor"),
    ("workers.learner.rank", "LearnerRank.weight_update"),
    ("workers.rollout.worker", "RolloutWorker.submit"),
    ("trainer.run.buffer", "Buffer.finish"),
    ("trainer.watch.tracking", "Tracker.log"),
]
IN_A_CHECKPOINT = [
    ("workers.learner.rank", "LearnerRank.snapshot"),
    ("rlframe.session_io", "save_file"),
    ("trainer.run.recovery", "write_state"),
    ("trainer.run.checkpoints", "seal"),
    ("trainer.run.checkpoints", "replace"),
    ("trainer.run.checkpoints", "sync_folder"),
    ("trainer.run.checkpoints", "Checkpoints._prune"),
    ("shutil", "rmtree"),
]


def train(run_dir: Path, overrides: list[str], point: Point | None = None) -> int:
    """Begin or resume a run in a process of its own; returns the exit code, -9 for a killed one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.local_run"])
    process = context.Process(target=_train, args=(run_dir, overrides, point))
    process.start()
    process.join()
    return process.exitcode


def _train(run_dir: Path, overrides: list[str], point: Point | None) -> None:
    if point is not None:
        _arm(point)
    run(run_dir, *overrides, resume=True, signals=True)


def _arm(point: Point) -> None:
    owner = importlib.import_module(point.module)
    *path, name = point.function.split(".")
    for part in path:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), 0

    def armed(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == point.nth and not point.after:
            os.kill(os.getpid(), point.number)
        result = original(*args, **kwargs)
        if calls == point.nth and point.after:
            os.kill(os.getpid(), point.number)
        return result

    setattr(owner, name, armed)


def numbers(rows: list[dict]) -> list[dict]:
    """Everything but the clock."""
    return [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in rows]


def read_rows(run_dir: Path) -> list[dict]:
    """The lines of ``metrics.jsonl``."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def trained(run_dir: Path) -> list[dict]:
    """All trajectories that were trained on, in the order of steps, then of admission (``log.rollouts_count`` = batch)."""
    rows = [json.loads(line) for path in (run_dir / "rollouts").glob("step_*") for line in path.read_text().splitlines()]
    return sorted(rows, key=lambda row: (row["step"], row["index"]))


def waiting(run_dir: Path) -> dict[int, tuple]:
    """Tokens and versions, by index, of the finished trajectories in the checkpoint that a resume would take."""
    checkpoint, _ = Checkpoints(run_dir, CheckpointConfig()).newest()
    batches = read_batches(checkpoint) if checkpoint else []
    return {t.index: (t.tokens.tolist(), t.versions[t.action_mask].tolist()) for batch in batches for t in batch}


def check_survivors(run_dir: Path, survivors: dict[int, tuple]) -> None:
    """What `waiting` saw before a resume was trained on as it was, as far as the run went."""
    used = {
        row["index"]: (row["tokens"]["id"], [version for version in row["tokens"]["version"] if version is not None])
        for row in trained(run_dir)
    }
    assert {index: seen for index, seen in survivors.items() if index <= max(used)}.items() <= used.items()


def check_log(run_dir: Path, steps: int) -> None:
    """Each step is logged once, under the right version; an attempt first serves what was last served under its version."""
    rows = read_rows(run_dir)
    assert [row["step"] for row in rows] == list(range(steps + 1))
    assert [row["version"] for row in rows[1:]] == list(range(1, steps + 1))
    served: dict[int, str] = {}
    first = False
    for line in (run_dir / "logs" / "controller.log").read_text().splitlines():
        if re.search(r"an attempt begins after step -?\d+$", line):
            first = True
        elif found := re.search(r"version (\d+) is served with checksum (\w+)$", line):
            version, checksum = int(found[1]), found[2]
            if first:
                assert served.get(version, checksum) == checksum, f"version {version} came back as other weights"
            served[version], first = checksum, False
    assert sorted(served) == list(range(steps + 1))
