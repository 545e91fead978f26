"""A real Ray cluster of several nodes on this machine: ``ray start`` processes of our own, with their own ports and folder."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import requests

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]
ADDRESS = "127.0.0.2"
"""Of the head; Ray replaces 127.0.0.1 by the address that other machines see."""
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
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def wait_for_port(port: int, process: subprocess.Popen, log: Path) -> None:
    """Return when ``process`` accepts connections at ``port``."""
    while True:
        assert process.poll() is None, f"the head did not start: {log.read_text()[-3000:]}"
        with suppress(OSError):
            return socket.create_connection((ADDRESS, port), 60).close()
        time.sleep(0.2)


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

    def wait_for_nodes(self, processes: list[subprocess.Popen], logs: list[Path]) -> None:
        """Return when every one of ``processes`` is a living node of the cluster."""
        for _ in range(1200):
            for process, log in zip(processes, logs, strict=True):
                assert process.poll() is None, f"a node did not start: {log.read_text()[-3000:]}"
            answer = self.get("/api/v0/nodes")
            if answer and [node["state"] for node in answer["data"]["result"]["result"]] == ["ALIVE"] * len(processes):
                return
            time.sleep(0.2)
        raise AssertionError("the nodes did not find each other")

    def call(self, *command: str, expect: int = 0, **variables: str) -> str:
        """Run a command of this environment as a user of the cluster would; what it printed."""
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            capture_output=True,
            text=True,
            timeout=280,
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
    nodes = [["--head", f"--port={gcs}", f"--dashboard-port={dashboard}", f"--temp-dir={folder}", "--num-cpus=0"]]
    nodes[0] += [f"--node-ip-address={ADDRESS}", f"--ray-client-server-port={client}"]
    nodes += [
        [f"--address={head}", f"--num-cpus={cpus}", f"--node-ip-address=127.0.0.{i + 3}"] for i, cpus in enumerate(workers)
    ]
    logs = [Path(folder) / f"node_{i}.log" for i in range(len(nodes))]
    running: list[subprocess.Popen] = []
    try:
        for node, agent, log in zip(nodes, agents, logs, strict=True):
            command = [str(BIN / "ray"), "start", *node, *common, f"--dashboard-agent-listen-port={agent}"]
            with log.open("w") as file:
                running.append(subprocess.Popen(command, env=environment(**variables), stdout=file, stderr=subprocess.STDOUT))
            if len(running) == 1:
                wait_for_port(gcs, running[0], log)
        cluster = RayCluster(head, f"http://127.0.0.1:{dashboard}")
        cluster.wait_for_nodes(running, logs)
        yield cluster
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)
