"""What the seconds go into between the command ``rlframe train`` and its first step, and between that and its end.

    python benchmarks/start.py [--against FOLDER] [--rounds 3] [--engines torch vllm]

Runs the command for one step and looks at it from outside, so that it costs the run nothing: when its folders, logs and lines
appear, and the CPU seconds of all its processes (user and system) until then. ``--against`` runs another checkout in turn with
this one, under the same load; what is printed is the median over the rounds, as wall / CPU seconds.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOOK_S = 0.04
"""Seconds between two looks."""
TICKS = os.sysconf("SC_CLK_TCK")

Run = tuple[Path, Path]
"""The run directory, and the file with its console."""
EVENTS: dict[str, Callable[[Run], bool]] = {
    "imports, settings, model and data": lambda run: (run[0] / "logs").exists(),
    "Ray": lambda run: (run[0] / "logs" / "controller.log").exists(),
    "wandb, gauges, reservation": lambda run: f"{run[0]}\n" in _text(run[1]),
    "actors: processes and imports": lambda run: all(
        (run[0] / "logs" / f"{who}_0.log").exists() for who in ("learner", "rollout")
    ),
    "actors: model and engine": lambda run: bool(_UP.search(_text(run[0] / "logs" / "controller.log"))),
    "first weights": lambda run: "version 0 is served" in _text(run[0] / "logs" / "controller.log"),
    "evaluation before the first step": lambda run: '"step": 0,' in _text(run[0] / "metrics.jsonl"),
    "first step": lambda run: '"step": 1,' in _text(run[0] / "metrics.jsonl"),
}
"""What ends each part, in order; the end of the command ends the last, which is "end"."""
KINDS = {
    "gcs_server": "Ray: GCS",
    "raylet/raylet": "Ray: raylet",
    "dashboard/dashboard.py": "Ray: dashboard",
    "dashboard/agent.py": "Ray: metrics agent",
    "runtime_env/agent": "Ray: runtime_env agent",
    "log_monitor.py": "Ray: log monitor",
    "autoscaler": "Ray: autoscaler",
    "cluster/head_process.py": "Ray: head",
    "wandb": "wandb",
    "ray::Rollout": "rollout worker",
    "ray::Learner": "learner rank",
    "ray::": "Ray: idle workers",
    "default_worker.py": "Ray: idle workers",
    "trainer.cli.main train": "driver",
}
"""Processes by a part of their command line."""


_UP = re.compile("engines and learner are up|version 0 is served")
"""Older checkouts say only the latter."""


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


class Family:
    """CPU seconds of a process and all that it started, also of those that have ended."""

    def __init__(self, root: int) -> None:
        self.seconds: dict[int, float] = {root: 0.0}
        self.commands: dict[int, str] = {}

    def look(self) -> float:
        """CPU seconds so far."""
        seen: dict[int, tuple[int, float]] = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:  # gone
                continue
            seen[int(name)] = int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS
        for pid in sorted(seen):
            parent, seconds = seen[pid]
            if parent in self.seconds or pid in self.seconds:
                self.seconds[pid] = seconds
                self._name(pid)
        return sum(self.seconds.values())

    def _name(self, pid: int) -> None:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return
        if command:
            self.commands[pid] = command

    def by_kind(self) -> dict[str, float]:
        """CPU seconds by kind of process."""
        total: dict[str, float] = {}
        for pid, seconds in self.seconds.items():
            command = self.commands.get(pid, "")
            kind = next((name for part, name in KINDS.items() if part in command), "other")
            total[kind] = total.get(kind, 0.0) + seconds
        return total


def measure(tree: Path, engine: str, folder: Path) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
    """Wall and CPU seconds of every part, and CPU seconds by kind of process."""
    run = folder / "run", folder / "console"
    command = [
        sys.executable,
        "-m",
        "trainer.cli.main",
        "train",
        f"run_dir={run[0]}",
        "name=start",
        "steps=1",
        f"rollout={engine}",
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    marks, begun = [(0.0, 0.0)], time.monotonic()
    with run[1].open("w") as console:
        process = subprocess.Popen(
            command, cwd=folder, stdout=console, stderr=subprocess.STDOUT, env={**environment, "PYTHONPATH": str(tree)}
        )
    family, waited = Family(process.pid), list(EVENTS.values())
    while process.poll() is None:
        cpu = family.look()
        while waited and waited[0](run):
            marks.append((time.monotonic() - begun, cpu))
            del waited[0]
        time.sleep(LOOK_S)
    if process.returncode or waited:
        raise SystemExit(f"{' '.join(command)} in {tree} ended with {process.returncode}:\n{_text(run[1])}")
    marks.append((time.monotonic() - begun, family.look()))
    parts = zip([*EVENTS, "end"], marks, marks[1:], strict=False)
    times = {name: (after[0] - before[0], after[1] - before[1]) for name, before, after in parts}
    return {**times, "to the first step": marks[-2], "all": marks[-1]}, family.by_kind()


def main() -> None:
    """Print a table for each engine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="*", default=["torch", "vllm"])
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to look at")
    arguments = parser.parse_args()
    trees = {"before": arguments.against.resolve(), "now": arguments.tree} if arguments.against else {"now": arguments.tree}
    for engine in arguments.engines:
        parts: dict[str, list[dict[str, tuple[float, float]]]] = {name: [] for name in trees}
        kinds: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        for _ in range(arguments.rounds):
            for name, tree in trees.items():
                folder = Path(tempfile.mkdtemp(prefix="rlframe-start-"))
                times, by_kind = measure(tree, engine, folder)
                parts[name].append(times)
                kinds[name].append(by_kind)
                shutil.rmtree(folder)
        print(f"\n{engine}: seconds, wall / CPU{'':21}" + "".join(f"{name:>16}" for name in trees))
        for part in parts["now"][0]:
            cells = [[statistics.median(run[part][i] for run in parts[name]) for i in (0, 1)] for name in trees]
            print(f"  {part:44}" + "".join(f"{wall:8.1f} / {cpu:5.1f}" for wall, cpu in cells), flush=True)
        for kind in sorted({kind for name in trees for run in kinds[name] for kind in run}):
            cpu = [statistics.median(run.get(kind, 0.0) for run in kinds[name]) for name in trees]
            print(f"  CPU of {kind:37}" + "".join(f"{'':8}   {seconds:5.1f}" for seconds in cpu), flush=True)


if __name__ == "__main__":
    main()
