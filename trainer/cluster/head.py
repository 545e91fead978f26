"""A Ray head of this run alone, in a process of its own, so that it starts while the driver imports and checks.

The process is `trainer.cluster.head_process`; it ends when this one does, however that happens. This module does not know
what runs on the head.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cluster import head_process

if TYPE_CHECKING:
    from trainer.cluster.placement import Placement

END_S = 20.0
"""How long a head may take to end by itself."""


class RayHeadFailed(RuntimeError):
    """No head starts on this machine; the message has Ray's reason."""


class RayHead:
    """A head that starts; `address` waits for it.

    Args:
        cpus: what it offers; logical, so it may exceed the machine's.
    """

    def __init__(self, cpus: float) -> None:
        self._up = False
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        # A session of its own: Ctrl-C in a terminal is for the driver, which ends the head after its actors.
        self._process = subprocess.Popen(
            [sys.executable, "-P", head_process.__file__, str(math.ceil(cpus))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,
        )

    def address(self) -> tuple[str, dict[str, str]]:
        """The head's address, and the environment variables that authenticate a client.

        Raises:
            RayHeadFailed: it did not start.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = (
            json.loads(line) if line.endswith(b"\n") else {"error": self._output() or "the head ended while it started"}
        )
        if "error" in answer:
            raise RayHeadFailed(f"No Ray head starts on this machine: {answer['error'].strip()}")
        self._up = True
        return answer["address"], answer["environment"]

    def log_to(self, path: Path) -> None:
        """Write the head's output to ``path``, including what it has printed so far."""
        with path.open("a") as file:
            file.write(self._output())
        assert self._process.stdin is not None
        self._process.stdin.write(f"{path}\n".encode())
        self._process.stdin.flush()

    def _output(self) -> str:
        said = self._said.fileno()  # its position is the head's
        return os.pread(said, os.fstat(said).st_size, 0).decode(errors="replace")

    def end(self) -> None:
        """Ask the head to end, without waiting for it; one that is still starting is killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if not self._up:
            self.kill()

    def wait(self) -> None:
        """Wait until a head that ends is gone."""
        assert self._process.stdout is not None
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process.stdout.close()
        self._said.close()

    def kill(self) -> None:
        """End it now, also while it starts; Linux ends Ray's processes with the one that started them."""
        self._process.kill()
        self._process.wait()


ray_heads: list[RayHead] = []
"""The local head of this process, if any: started ahead, or by `trainer.cluster.ray_cluster.start_ray`."""


@contextlib.contextmanager
def prestarted_head(placement: Placement) -> Iterator[None]:
    """Start the local head of ``placement``, if it wants one, beside what the driver does before it needs Ray.

    A head that was not taken over is ended afterwards.
    """
    if placement.address is None:
        ray_heads.append(RayHead(placement.cpus))
    try:
        yield
    finally:
        while ray_heads:
            ray_heads.pop().kill()
