"""What our processes do to themselves: where output goes, where modules of the user are found."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def find_modules_in(folder: str) -> None:
    """Let modules of the user in ``folder`` be imported; what is installed goes first, so that nothing of ours is shadowed."""
    if folder not in sys.path:
        sys.path.append(folder)


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
