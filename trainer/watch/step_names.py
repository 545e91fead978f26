"""What folders and files of one step are called: ``step_`` and the step with six digits, more where it needs more.

A copy (``step_000007_backup``, ``step_7``) has another name, so it is never taken for one of ours.
"""

from __future__ import annotations

import re
from pathlib import Path


def is_step_name(name: str) -> bool:
    """Whether ``name`` is exactly that of a step."""
    digits = name.removeprefix("step_")
    return re.fullmatch(r"step_[0-9]{6,}", name) is not None and f"{int(digits):06d}" == digits


def step_of(path: Path) -> int:
    """The step that a folder or file belongs to whose name, without its ending, is that of a step."""
    return int(path.stem.removeprefix("step_"))
