"""Processes of a run, as Linux sees them."""

import time
from pathlib import Path

PATIENCE_S = 600


def wait_for(condition):
    """Poll until ``condition`` holds; returns what it gave."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return value


def alive(pid):
    return _stat(pid)[0] not in ("", "Z")


def descendants(pid):
    """Pids of all processes below ``pid``."""
    parents = {int(entry.name): int(_stat(int(entry.name))[1]) for entry in Path("/proc").glob("[0-9]*")}
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def named(pids, part):
    """Those of ``pids`` that have ``part`` in their command line."""
    return [pid for pid in pids if part in _read(pid, "cmdline")]


def _stat(pid):
    """State and parent."""
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return (fields[0], fields[1]) if fields else ("", "0")


def _read(pid, name):
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
