"""Which Ray cluster a job runs on: a head of its own on this machine, or an existing one: joining, inspecting, reserving.

See `trainer.cluster.placement` for what a job asks for and `trainer.cluster.submit` for sending one from outside.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray._raylet import Config as RayConfig  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError

from rlframe.config import ConfigError
from trainer.cluster.head import RayHead, ray_heads
from trainer.cluster.head_process import SETTINGS
from trainer.cluster.placement import Placement
from workers.pools import Pool, reserve

CONNECT_S = 10.0
"""How long a head may take to accept a connection."""


def start_ray(placement: Placement, log: Path | None = None) -> None:
    """Join the cluster of ``placement.address``, or a head of our own (its CPUs are logical: as many as the job asks for).

    Args:
        placement: what the job asks for.
        log: file for the output of Ray's own processes and of its client here; None: stderr, and nowhere for the former.

    Raises:
        ConfigError: no cluster answers there, or it refuses us.
        RayHeadFailed: no local head starts.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    address = placement.address
    if log is not None:
        _log_to(log)
    common: dict[str, Any] = {"log_to_driver": False, "configure_logging": log is None, "logging_level": "warning"}
    if address is None:
        head = ray_heads[0] if ray_heads else RayHead(placement.cpus)
        ray_heads[:] = [head]
        address, environment = head.address()
        if log is not None:
            head.log_to(log)
        os.environ.update(environment)
        RayConfig.initialize("")  # reads the environment again: a new head may want a token, by Ray's own choice
        ray.init(address=address, **common)
        return
    _check_reachable(address)
    try:
        ray.init(address=address, **common)
    except AuthenticationError:
        raise ConfigError(
            f"The cluster at {address} wants a token; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH."
        ) from None
    except ConnectionError as error:
        raise ConfigError(_unreachable(address, str(error).splitlines()[0])) from None


@contextlib.contextmanager
def stopping_ray() -> Iterator[None]:
    """Leave the cluster; the local head, if there is one, ends while the body runs."""
    ray.shutdown()
    for head in ray_heads:
        head.end()
    try:
        yield
    finally:
        while ray_heads:
            ray_heads.pop().wait()


def _log_to(log: Path) -> None:
    """Send the remarks of Ray's client in this process to ``log`` instead of the console."""
    handler = logging.FileHandler(log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.setLevel(logging.WARNING)
    logging.getLogger("ray").handlers[:] = [handler]


def _check_reachable(address: str) -> None:
    """Fail at once where nothing listens; Ray itself would retry for a long time."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        raise ConfigError(_unreachable(address, str(error))) from None


def _unreachable(address: str, reason: str) -> str:
    return (
        f"No Ray cluster answers at {address} ({reason}); start one with `ray start --head`, or leave out cluster.address "
        "and RAY_ADDRESS to train on this machine alone."
    )


def node_resources() -> dict[str, dict[str, float]]:
    """What each living node of the cluster has in all, by the node's address and the start of its id."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return {f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})": node["Resources"] for node in nodes}


def reserve_pools(placement: Placement, timeout_s: float, say: Callable[[str], None]) -> dict[str, Pool]:
    """Compare the request with the cluster, then reserve it.

    Args:
        placement: what the job asks for.
        timeout_s: longest time to wait while other jobs hold what is asked for.
        say: shows a line to the user.

    Returns:
        Pools by name of the group.

    Raises:
        ConfigError: the cluster is too small, or what is asked for did not become free in time.
    """
    placement.check_cluster(node_resources())

    def on_wait() -> None:
        say(f"waiting for the cluster: {placement.asked()}, but {_free()}")

    pools = reserve(list(placement.groups), timeout_s, on_wait)
    if pools is None:
        raise ConfigError(
            f"The job asks for {placement.asked()}, which the cluster has, but {_free()}; "
            "stop another job or ask for less (waited cluster.startup_timeout_s)."
        )
    return pools


def _free() -> str:
    free = ray.available_resources()
    return f"{free.get('CPU', 0.0):g} CPUs and {free.get('GPU', 0.0):g} GPUs are free now"
