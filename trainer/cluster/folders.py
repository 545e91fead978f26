"""Folders that a run writes in, checked before anything starts: its own, and the temporary one with the sockets of Ray.

Standard library only, so that ``rlframe doctor`` works on a bare machine. Nothing is created here.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rlframe.config import ConfigError

SOCKET_BYTES = 103 if sys.platform == "darwin" else 107
"""Longest path of a unix socket."""
RAY_SOCKET = "ray/session_2026-12-01_01-25-20_123456_4194304/sockets/plasma_store"
"""The longest socket that a Ray head makes in its temporary folder: with a time and the largest process number."""
ENGINE_SOCKET = "01234567-89ab-cdef-0123-456789abcdef"
"""The longest socket that an engine makes in the temporary folder (vLLM)."""


def check_run_dir(run_dir: str) -> None:
    """Refuse a run directory that is a file, lies below one, or cannot be made or written.

    Raises:
        ConfigError: one sentence that names it.
    """
    fault = unwritable(run_dir)
    if fault:
        raise ConfigError(f"run_dir={run_dir} {fault}; give a folder that can be made and written.")


def new_run_dir(run_dir: str) -> Path:
    """The absolute path of a run directory that a new run may use.

    Raises:
        ConfigError: as `check_run_dir`; or another run is there.
    """
    check_run_dir(run_dir)
    folder = Path(run_dir).absolute()
    if (folder / "config.yaml").exists():
        raise ConfigError(
            f"{folder} holds a run already: `rlframe resume {run_dir}` resumes it, another name=... starts a new run."
        )
    return folder


def refuse_lost_run_dir(run_dir: str) -> None:
    """A relative run directory inside a job would lie in the copy of the working directory that Ray deletes.

    Raises:
        ConfigError: it does.
    """
    if "_ray_pkg_" in os.path.abspath(run_dir):
        raise ConfigError(lost_run_dir(run_dir))


def lost_run_dir(run_dir: str) -> str:
    """The sentence that refuses a relative run directory of a job."""
    return (
        f"run_dir={run_dir} would lie in the copy of the working directory, which Ray deletes after the job; "
        "give an absolute path that all nodes share, such as run_dir=/shared/runs/NAME."
    )


def check_temporary_folder() -> None:
    """Refuse a temporary folder that a Ray head on this machine cannot work in.

    Raises:
        ConfigError: one sentence that says which variable to set.
    """
    fault = temporary_folder_fault()
    if fault:
        raise ConfigError(f"{fault}.")


def temporary_folder_fault(environment: Mapping[str, str] = os.environ) -> str | None:
    """Why Ray or an engine could not work in the temporary folder, and what to do, without a full stop; None if they can."""
    name = "RAY_TMPDIR" if "RAY_TMPDIR" in environment else "TMPDIR"
    for variable, folder, inside in (
        (name, environment.get(name) or "/tmp", RAY_SOCKET),
        ("TMPDIR", environment.get("TMPDIR") or tempfile.gettempdir(), ENGINE_SOCKET),
    ):
        room = SOCKET_BYTES - len(os.fsencode(f"/{inside}"))
        length = len(os.fsencode(os.path.abspath(folder)))
        if length > room:
            return (
                f"{variable}={folder} is {length} bytes long, but the sockets in it may only take {SOCKET_BYTES} bytes with "
                f"their names; set {variable} to a folder of at most {room} bytes, such as /tmp"
            )
        fault = unwritable(folder)
        if fault:
            return f"{variable}={folder} {fault}; set {variable} to a folder that can be written, such as /tmp"
    return None


def unwritable(folder: str) -> str | None:
    """Why a folder cannot be created and written, to complete "FOLDER ..."; None: no visible reason."""
    if "\0" in folder:
        return "cannot be made (it holds a null byte)"
    path = Path(os.path.expanduser(folder)).absolute()
    for part in (path, *path.parents):
        try:
            is_folder = part.is_dir()
            if not is_folder and not os.path.lexists(part):
                continue
        except PermissionError:
            continue
        except OSError as error:  # a name that is too long
            return f"cannot be made ({error.strerror})"
        if not is_folder:
            what = "a link to nothing" if part.is_symlink() and not part.exists() else "a file"
            return f"is {what}" if part == path else f"lies below {part}, which is {what}"
        if not os.access(part, os.W_OK | os.X_OK):
            return "cannot be written (no permission)" if part == path else f"cannot be made (no permission in {part})"
        return None
    return None
