"""Memory that a rollout worker fills with weights and its engine core, another process of this machine, reads where it lies.

Bytes only; `workers.engines.vllm.engine` writes them and `workers.engines.vllm.extension` reads them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable

import numpy as np


class WeightMemory:
    """Anonymous shared memory that grows as needed and is kept for the next update; it ends with its process, in any case."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.memfd_create("rlframe-weights"), "r+b")
        self._map: mmap.mmap | None = None

    @property
    def path(self) -> str:
        """Where other processes of the same user find it."""
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def fill(self, arrays: Iterable[np.ndarray]) -> None:
        """Lay the bytes of ``arrays`` one after another, from the start."""
        parts = [array.reshape(-1).view(np.uint8) for array in arrays]
        size = sum(part.size for part in parts)
        if self._map is None or size > len(self._map):
            self._file.truncate(max(size, 1))
            self._map = mmap.mmap(self._file.fileno(), max(size, 1))
        if size:
            np.concatenate(parts, out=np.frombuffer(self._map, np.uint8, size))

    def close(self) -> None:
        """Free the memory, once it has no reader; closing again does nothing."""
        self._map = None
        self._file.close()


def mapped(path: str) -> mmap.mmap:
    """What lies in another process's `WeightMemory`; ``path`` is its `WeightMemory.path`."""
    file = os.open(path, os.O_RDWR)
    try:
        # Entering all pages at once is cheaper than a fault for each.
        return mmap.mmap(file, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(file)
