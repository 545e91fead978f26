"""Setup of our own processes: output redirection, where modules are found and how they are imported, signals."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path

import rlframe
from rlframe.config import ConfigError

PACKAGES = ("rlframe", "workers", "trainer")
SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that end a process in an orderly way."""


def refuse_shadowing(folder: str) -> None:
    """Refuse a folder of the user with modules that are named like our packages.

    Ray puts the directory that a job runs in before the installed packages, so that its processes would import those.

    Raises:
        ConfigError: there is one; the message names it.
    """
    ours = Path(rlframe.__file__).parents[1]
    for name in PACKAGES:
        found = PathFinder.find_spec(name, [os.path.abspath(folder)])
        if found is None or found.origin is None:  # a folder without __init__.py does not come before an installed package
            continue
        if not os.path.samefile(found.origin, ours / name / "__init__.py"):
            raise ConfigError(
                f"{found.origin} has the name of a package of rlframe, and Ray's processes would import it instead; rename it, "
                "or start from another folder."
            )


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Import large libraries inside: without the garbage collector, which finds nothing in them and takes a fifth of the time.

    What they hold lives as long as the process, so later collections leave it out, too.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
            gc.freeze()


def find_modules_in(folder: str) -> None:
    """Let modules of the user in ``folder`` be imported; what is on the path already goes first."""
    if folder not in sys.path:
        sys.path.append(folder)


def interruptible() -> None:
    """Let SIGTERM, like SIGINT, end what blocks the main thread: both raise KeyboardInterrupt there.

    Called again after ``ray.init``, which puts its own handler in place; a run's event loop has handlers of its own
    (`trainer.run.attempts.on_signal`).
    """
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)


def redirect_output(log_file: str | None) -> None:
    """Send this process's stdout and stderr (the file descriptors, so that native code is included) to ``log_file``."""
    if log_file is None:
        return
    Path(log_file).parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
