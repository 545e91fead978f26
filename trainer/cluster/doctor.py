"""``rlframe doctor``: whether this machine can train, check by check, and what to do where it cannot. Changes nothing.

A check looks at one thing and returns one `Finding`; its inputs are arguments, so that tests can pass in another machine's
facts. Checks of a configuration are in `trainer.settings.checks`, of a cluster's size in
`trainer.cluster.placement`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from trainer.cluster.folders import temporary_folder_fault
from trainer.settings.redact import redact_text
from trainer.settings.requirements import Declared, declared, is_installed
from workers.engines.registry import ENGINES, engine_spec
from workers.rollout.settings import RolloutConfig

DISK_GIB = 2.0
"""Free space that checkpoints and logs of a small run need."""
SHARED_MEMORY_GIB = 1.0
"""Below this Ray keeps its object store on disk, which is slow."""
NOT_FOR_RUNNING = ("dev", "peers")
"""Extras that no command needs."""
START_TIMEOUT_S = 300
"""Longest time that a tiny start of an engine may take."""


@dataclass(frozen=True)
class Finding:
    """What a check found."""

    name: str
    """What was checked."""
    text: str
    """What was found."""
    todo: str | None = None
    """What to do; None: nothing."""


def python(found: tuple[int, ...] = tuple(sys.version_info[:3])) -> Finding:
    """The interpreter: 3.11 or newer."""
    text = ".".join(map(str, found))
    return Finding("Python", text, None if found >= (3, 11) else "install Python 3.11 or newer")


def packages(installed: Callable[[str], str] = version) -> Finding:
    """Everything that training imports, in the versions that fit together (``pip``'s metadata of rlframe).

    Args:
        installed: version of a distribution; raises PackageNotFoundError.
    """
    try:
        wanted = [one for one in declared() if one.extra in (None, "train")]
    except PackageNotFoundError:
        return Finding("packages", "rlframe itself is not installed", "run `make install`")
    wrong = [fault for one in wanted if (fault := _fault(one, installed))]
    if wrong:
        return Finding("packages", "; ".join(wrong), 'run `make install`, or `pip install "rlframe[train]"`')
    return Finding("packages", f"{len(wanted)} requirements met")


def _fault(wanted: Declared, installed: Callable[[str], str]) -> str | None:
    """Why a requirement is not met."""
    if not is_installed(wanted.name, installed):
        return f"{wanted.name} is missing (wanted {wanted.versions})"
    if importlib.util.find_spec("packaging") is None:  # itself one of those that are missing
        return None
    from packaging.requirements import Requirement

    there, specifier = installed(wanted.name), Requirement(wanted.line).specifier
    return None if specifier.contains(there, prereleases=True) else f"{wanted.name} is {there} (wanted {specifier})"


def extras(installed: Callable[[str], str] = version) -> Finding:
    """Which extras are here; a missing one is not a problem, but explains why a command or a task may be refused."""
    try:
        names = {one.extra for one in declared() if one.extra and one.extra not in NOT_FOR_RUNNING}
    except PackageNotFoundError:
        return Finding("extras", "rlframe itself is not installed")
    missing = {
        extra: [one.name for one in declared() if one.extra == extra and not is_installed(one.name, installed)]
        for extra in sorted(names)
    }
    here = ", ".join(extra for extra, left in missing.items() if not left) or "none"
    absent = "; ".join(f"{extra} (wants {', '.join(left)})" for extra, left in missing.items() if left)
    return Finding("extras", f"installed: {here}" + (f"; not installed: {absent}" if absent else ""))


def ray(cluster: str | None = None) -> Finding:
    """Ray here and, where ``cluster`` gives it, the version on a cluster: they must be equal."""
    try:
        here = version("ray")
    except PackageNotFoundError:
        return Finding("Ray", "missing", "run `make install`")
    if cluster and cluster != here:
        return Finding(
            "Ray", f"{here}, and {cluster} on the cluster", f'install the same: `pip install "ray[default]=={cluster}"`'
        )
    return Finding("Ray", here + (", as on the cluster" if cluster else ""))


def engine(name: str, start: bool = False, run: Callable[[str], str | None] | None = None) -> Finding:
    """An engine of ``rollout.engine``: installed, imported in a process of its own and, with ``start``, asked for tokens.

    Args:
        name: key of `workers.engines.registry.ENGINES`.
        start: also start it on the tiny model.
        run: runs a program and returns the last line of what went wrong, or None.
    """
    label = f"engine {name}"
    spec = engine_spec(name)
    present = next((f"{d} {version(d)}" for d in spec.distributions if is_installed(d)), None)
    if present is None:
        return Finding(label, "not installed", f"{spec.install}; or train with another rollout.engine")
    problem = (run or _python)(_TINY_START.format(name=name) if start else f"import {spec.package}")
    if problem:
        return Finding(label, f"{present} does not {'start' if start else 'import'}: {problem}", "install the pinned versions")
    return Finding(label, f"{present} {'starts and samples' if start else 'imports'}")


_TINY_START = """
import asyncio, numpy as np
from trainer.settings.compose import compose
from rlframe.models import resolve_model
from workers.engines.protocol import SamplingParams
from workers.engines.registry import make_engine

async def main():
    config = compose(["rollout.engine={name}", "model.build.warmup_steps=0"])
    engine = make_engine(config, resolve_model(config.model), 0)
    await engine.start()
    try:
        done = await engine.generate(np.array([1, 2, 3]), SamplingParams(max_new_tokens=2))
        assert len(done.ids) >= 1
    finally:
        await engine.close()

if __name__ == "__main__":
    asyncio.run(main())
"""


def _python(program: str) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "check.py"
        script.write_text(program)
        try:
            done = subprocess.run(
                [sys.executable, str(script)], capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"nothing within {START_TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def disk(folder: str = ".", free: Callable[[str], int] = lambda path: shutil.disk_usage(path).free) -> Finding:
    """Free space where runs are written."""
    there = free(folder) / 2**30
    todo = None if there >= DISK_GIB else f"free {DISK_GIB:g} GiB, or set run_dir to a larger disk"
    return Finding("disk", f"{there:.1f} GiB free in {os.path.abspath(folder)}", todo)


def shared_memory(path: str = "/dev/shm", free: Callable[[str], int] = lambda path: shutil.disk_usage(path).free) -> Finding:
    """What Ray's object store lives in."""
    if not os.path.isdir(path):
        return Finding("shared memory", f"no {path} on this system; Ray uses files")
    there = free(path) / 2**30
    todo = None
    if there < SHARED_MEMORY_GIB:
        todo = f"give {path} {SHARED_MEMORY_GIB:g} GiB or more; in a container `docker run --shm-size=8g`"
    return Finding("shared memory", f"{there:.1f} GiB free in {path}", todo)


def temporary_folder(environment: Mapping[str, str] = os.environ) -> Finding:
    """Where Ray and engines keep their sockets, whose paths must be short."""
    folder = environment.get("RAY_TMPDIR") or environment.get("TMPDIR") or "/tmp"
    found, _, todo = (temporary_folder_fault(environment) or folder).partition("; ")
    return Finding("temporary folder", found, todo or None)


def gpus(names: list[str], nvidia_smi: bool, cuda_build: str | None) -> Finding:
    """GPUs that torch sees.

    Args:
        names: of the GPUs that torch sees.
        nvidia_smi: whether the driver's tool is there, which means that the machine has GPUs.
        cuda_build: CUDA version that torch was built for; None: a build for CPUs.
    """
    if names:
        return Finding("GPUs", f"{len(names)} ({', '.join(sorted(set(names)))})")
    if nvidia_smi and cuda_build is None:
        return Finding("GPUs", "a driver, but torch is a build for CPUs", 'install `pip install "rlframe[train,vllm]"`')
    if nvidia_smi:
        return Finding("GPUs", f"a driver, but torch for CUDA {cuda_build} sees none", "compare the driver with `nvidia-smi`")
    return Finding("GPUs", "none; training runs on CPUs")


def gpu_names() -> list[str]:
    """Names of the GPUs that torch sees; none without torch."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def variables(environment: Mapping[str, str] = os.environ) -> Finding:
    """Variables of the environment that send a run elsewhere."""
    address = environment.get("RAY_ADDRESS")
    if address and "://" in address:
        return Finding(
            "environment",
            redact_text(f"RAY_ADDRESS={address} is a dashboard"),
            "unset RAY_ADDRESS, or use RAY_API_SERVER_ADDRESS for it",
        )
    return Finding(
        "environment", redact_text(f"RAY_ADDRESS={address}: runs join that cluster") if address else "RAY_ADDRESS is not set"
    )


def check_all(start: bool, cluster: str | None = None) -> Iterator[Finding]:
    """All checks of this machine, one after the other.

    Args:
        start: also start each engine that is installed.
        cluster: version of Ray on a cluster to compare with.
    """
    yield python()
    yield packages()
    yield extras()
    yield ray(cluster)
    for name in ENGINES:
        spec = engine_spec(name)
        wanted = name == RolloutConfig().engine  # that another one is absent is no problem
        if spec.distributions and (wanted or any(map(is_installed, spec.distributions))):
            yield engine(name, start)
    yield disk()
    yield shared_memory()
    yield temporary_folder()
    cuda_build = None
    if importlib.util.find_spec("torch"):
        import torch

        cuda_build = torch.version.cuda
    yield gpus(gpu_names(), shutil.which("nvidia-smi") is not None, cuda_build)
    yield variables()
