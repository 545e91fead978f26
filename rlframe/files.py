"""Files that must survive a crash: forced to disk, described by size and sha256, replaced in one step. No format lives here."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TypedDict


class Entry(TypedDict):
    """What a manifest says about one file."""

    bytes: int
    """Size."""
    sha256: str
    """Hex digest of the content."""


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(path: Path) -> Entry:
    """Force a file that was just written to disk and describe it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def replace(path: Path, text: str) -> None:
    """Give ``path`` a new content in one step: a reader finds the old or the new one, also after a crash."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text, "utf-8")
    seal(temporary)
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Force renames inside a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
