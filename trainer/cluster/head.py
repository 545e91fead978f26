"""A Ray head of this run alone, in a process of its own, so that it starts while the driver imports and checks.

The same file is that process: ``python -P head.py CPUS`` starts the head, says on stdout where it is, and takes it down when
its stdin closes, which also happens when the driver is killed. It imports Ray and nothing of ours, so that neither the
driver's folder nor its imports matter to it.
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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.cluster.placement import Placement

STARTS = 3
"""How often Ray tries to start a head before giving up."""
END_S = 20.0
"""How long a head may take to end by itself."""
SETTINGS = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 starves engine and learner beside anything else that runs
}
"""Ray's own settings, by environment variable, where the user has set none."""


class HeadFailed(RuntimeError):
    """No Ray head started on this machine; the message is Ray's."""


class Head:
    """A head that starts; `address` waits for it.

    Args:
        cpus: what it offers; logical, so it may exceed the machine's.
    """

    def __init__(self, cpus: float) -> None:
        self._up = False
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        # A session of its own: Ctrl-C in a terminal is for the driver, which ends the head after its actors.
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(math.ceil(cpus))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,
        )

    def address(self) -> tuple[str, dict[str, str]]:
        """Where the head listens, and the environment variables with which it lets somebody in.

        Raises:
            HeadFailed: it did not start.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line.endswith(b"\n") else {"error": self._output() or "the head ended while it started"}
        if "error" in answer:
            raise HeadFailed(answer["error"])
        self._up = True
        return answer["address"], answer["environment"]

    def log_to(self, path: Path) -> None:
        """Write what the head says to ``path``, with what it has said so far."""
        with path.open("a") as file:
            file.write(self._output())
        assert self._process.stdin is not None
        self._process.stdin.write(f"{path}\n".encode())
        self._process.stdin.flush()

    def _output(self) -> str:
        self._said.seek(0)
        return self._said.read().decode(errors="replace")

    def end(self) -> None:
        """Have the head end, without waiting for it; one that is still starting is killed."""
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


heads: list[Head] = []
"""The local head of this process, if there is one: started ahead, or by `trainer.cluster.ray_cluster.start_ray`."""


@contextlib.contextmanager
def head_ahead(placement: Placement) -> Iterator[None]:
    """Start the local head of ``placement``, if it wants one, beside what the driver does before it needs Ray.

    A head that nobody took over is gone afterwards.
    """
    if placement.address is None:
        heads.append(Head(placement.cpus))
    try:
        yield
    finally:
        while heads:
            heads.pop().kill()


def _start(cpus: int) -> str:
    """The address of a new head. Ray gives its own processes 30 s to find each other, which a busy machine may exceed: then
    they are started again.
    """
    import ray

    for left in reversed(range(STARTS)):
        try:
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level="warning")
            return str(ray.get_runtime_context().gcs_address)
        except Exception as error:
            if "timed out during startup" not in str(error) or not left:
                raise
            ray.shutdown()
    raise AssertionError


def main() -> None:
    """Hold a head until stdin closes; the first line of stdin, if there is one, is the file to write to from then on."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        address = _start(int(sys.argv[1]))
    except Exception as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    import ray

    environment = {name: value for name, value in os.environ.items() if name == "RAY_AUTH_MODE"}
    print(json.dumps({"address": address, "environment": environment}), flush=True)
    log = sys.stdin.readline().strip()
    if log:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)
        sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
