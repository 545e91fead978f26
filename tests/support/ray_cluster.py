"""A real Ray cluster of several nodes on this machine: ``ray start`` processes of our own, with their own ports and folder."""

import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import requests

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]
ADDRESS = "127.0.0.2"
"""Of the head; Ray replaces 127.0.0.1 by the address that other machines see."""
FIXED_PORTS = (20000, 30000)
"""Above those that Ray gives its workers, below those that Linux gives out (ip_local_port_range)."""
TRIES = 3
"""How often a node is started before giving up."""
TOKEN = "a-token-of-at-least-32-characters-"


def environment(**variables: str) -> dict[str, str]:
    """What processes of the cluster and its users start with."""
    unset = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "WANDB_API_KEY")
    return {
        **{name: value for name, value in os.environ.items() if name not in unset},
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        **variables,
    }


def check_ray_command(words: list[str]) -> dict[str, Any]:
    """Parse ``ray ...`` with Ray's own parser, which refuses what it does not know; the parameters."""
    assert words[0] == "ray"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray's own modules, on import
        from ray.dashboard.modules.job.cli import submit
        from ray.scripts.scripts import cli
    job = words[1:3] == ["job", "submit"]
    command = submit if job else cli.get_command(None, words[1])
    assert command is not None, words
    parameters: dict[str, Any] = command.make_context(words[1], words[3 if job else 2 :]).params
    return parameters


def free_ports(count: int) -> list[int]:
    """Ports that are free, and that no connection and no bind to port 0 gets before they are used, as those are above."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(*FIXED_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            found += [port] if port not in found else []
    return found


def start_node(arguments: list[str], log: Path, variables: dict[str, str], is_up: Callable[[], bool]) -> subprocess.Popen:
    """A ``ray start`` process, once ``is_up``; Ray gives up after 30 s on a busy machine, so it is tried again."""
    for _ in range(TRIES):
        with log.open("w") as file:
            command = [str(BIN / "ray"), "start", *arguments]
            process = subprocess.Popen(command, env=environment(**variables), stdout=file, stderr=subprocess.STDOUT)
        while process.poll() is None:
            if is_up():
                return process
            time.sleep(0.2)
    raise AssertionError(f"a node did not start: {log.read_text()[-3000:]}")


def listens(port: int) -> bool:
    """Whether something accepts connections at the head's address and ``port``."""
    with suppress(OSError):
        socket.create_connection((ADDRESS, port), 60).close()
        return True
    return False


class RayCluster:
    """Addresses of a running cluster."""

    def __init__(self, head: str, dashboard: str) -> None:
        self.head, self.dashboard = head, dashboard

    def get(self, path: str) -> Any:
        """An answer of the dashboard as JSON; None while there is none."""
        try:
            answer = requests.get(self.dashboard + path, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60)
            return answer.json() if answer.ok else None
        except requests.RequestException:
            return None

    def nodes(self) -> int:
        """Living nodes."""
        answer = self.get("/api/v0/nodes")
        return sum(node["state"] == "ALIVE" for node in answer["data"]["result"]["result"]) if answer else 0

    def call(self, *command: str, expect: int = 0, **variables: str) -> str:
        """Run a command of this environment as a user of the cluster would; what it printed."""
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            capture_output=True,
            text=True,
            timeout=800,
            env=environment(RAY_API_SERVER_ADDRESS=self.dashboard, **variables),
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout + done.stderr


@contextmanager
def ray_cluster(workers: list[int], **variables: str):
    """A head without CPUs, and a node with so many CPUs for each of ``workers``; every node has an address of its own.

    Args:
        workers: CPUs of each.
        variables: of the environment that ``ray start`` has.
    """
    folder = tempfile.mkdtemp(prefix="rlf", dir="/tmp")  # short: Ray puts sockets there
    gcs, dashboard, client, *agents = free_ports(4 + len(workers))
    head = f"{ADDRESS}:{gcs}"
    common = ["--block", "--object-store-memory=80000000", "--min-worker-port=0", "--max-worker-port=0"]
    nodes = [["--head", f"--port={gcs}", f"--dashboard-port={dashboard}", "--num-cpus=0"]]
    nodes[0] += [f"--node-ip-address={ADDRESS}", f"--ray-client-server-port={client}"]
    nodes += [
        [f"--address={head}", f"--num-cpus={cpus}", f"--node-ip-address=127.0.0.{i + 3}"] for i, cpus in enumerate(workers)
    ]
    cluster = RayCluster(head, f"http://127.0.0.1:{dashboard}")
    running: list[subprocess.Popen] = []
    try:
        for i, (node, agent) in enumerate(zip(nodes, agents, strict=True)):
            # Machines share no folders: what one node unpacks or removes of a job must not be under the feet of another.
            arguments = [*node, *common, f"--dashboard-agent-listen-port={agent}", f"--temp-dir={folder}/{i}"]
            is_up = partial(listens, gcs) if i == 0 else lambda i=i: cluster.nodes() == i + 1
            running.append(start_node(arguments, Path(folder) / f"node_{i}.log", variables, is_up))
        yield cluster
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)
