"""What every Ray actor of ours does to its own process: where its output goes, how many threads it uses."""

from __future__ import annotations

import os
import sys
from pathlib import Path


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
