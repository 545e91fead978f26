"""Resource pools: what a group of actors reserves on a cluster before the first of them starts, and on which nodes.

A pool is one Ray placement group with a bundle for each actor. A bundle lies on one node, so an engine that spans several
GPUs has them all on its node. The learner's ranks are packed (they exchange gradients all the time), rollout workers are
spread (they exchange nothing with each other). `trainer.cluster.placement` decides
what to request and whether the cluster can provide it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NOTICE_S = 5.0
"""Resources that are not free after this long are worth a line on the console."""
POLL_S = 0.1
"""Seconds between two looks at what is being reserved."""


class Request(Protocol):
    """Actors of one kind; see `trainer.cluster.placement.ActorGroup`."""

    @property
    def name(self) -> str:
        """Key of the pool."""

    @property
    def count(self) -> int:
        """Actors."""

    @property
    def cpus(self) -> float:
        """CPUs of each."""

    @property
    def gpus(self) -> float:
        """GPUs of each."""

    @property
    def strategy(self) -> str:
        """``PACK`` or ``SPREAD``."""


@dataclass(frozen=True)
class Pool:
    """Reserved resources, one bundle for each actor."""

    group: PlacementGroup | None
    """The placement group; None: the actors reserve nothing and go anywhere."""
    bundles: tuple[int, ...]
    """Bundle of each actor; actors that share a node have neighbouring numbers."""

    def starting_at(self, start: int) -> Pool:
        """The actors from ``start`` on, as a pool of their own."""
        return Pool(self.group, self.bundles[start:])

    def options(self, index: int) -> dict[str, Any]:
        """Options of the Ray actor ``index``: where it runs."""
        if self.group is None:
            return {}
        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=self.bundles[index]
            )
        }


def reserve(requests: list[Request], timeout_s: float, on_wait: Callable[[], None]) -> dict[str, Pool] | None:
    """Reserve a pool for every request, the largest bundles first; they are given back when the driver leaves Ray.

    Args:
        requests: what to reserve.
        timeout_s: longest time to wait until all of it is free.
        on_wait: called once if something is not free after a few seconds.

    Returns:
        Pools by name of the request; None if they did not become free in time (then nothing stays reserved).
    """
    groups: dict[str, PlacementGroup] = {}
    pools = {}
    waited = False
    for request in sorted(requests, key=lambda request: (request.gpus, request.cpus), reverse=True):
        bundle = {kind: amount for kind, amount in (("CPU", request.cpus), ("GPU", request.gpus)) if amount > 0}
        if not bundle:
            pools[request.name] = Pool(None, tuple(range(request.count)))
            continue
        group = placement_group([bundle] * request.count, strategy=request.strategy)
        groups[request.name] = group
        ready = _wait(group, min(NOTICE_S, timeout_s))
        if not ready and timeout_s > NOTICE_S:
            if not waited:
                on_wait()
                waited = True
            ready = _wait(group, timeout_s - NOTICE_S)
        if not ready:
            for reserved in groups.values():
                remove_placement_group(reserved)
            return None
        pools[request.name] = Pool(group, _by_node(group))
    return pools


def _wait(group: PlacementGroup, timeout_s: float) -> bool:
    """Whether ``group`` is reserved within the time; unlike its own ``wait``, this hears signals."""
    deadline = time.monotonic() + timeout_s
    while placement_group_table(group).get("state") != "CREATED":
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def _by_node(group: PlacementGroup) -> tuple[int, ...]:
    """Bundle numbers of a ready group, those of one node together: neighbouring ranks then share a machine."""
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    seen = list(dict.fromkeys(nodes[bundle] for bundle in sorted(nodes)))
    return tuple(sorted(nodes, key=lambda bundle: (seen.index(nodes[bundle]), bundle)))
