"""Whether the actors of two kinds fit on the nodes of a cluster and the GPUs of a node. Knows sizes and counts, nothing else.

An actor takes CPUs and GPUs of one node. Whole GPUs are its own; a part of a GPU (below 1) is a part of one GPU, which it may
share: two parts of 0.6 need two GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what runs here needs no Ray
    from workers.pools import Request

SLACK = 1e-6
"""Sums of parts that differ from a whole by rounding are whole."""


def fit(kinds: tuple[Request, Request], nodes: Iterable[Mapping[str, float]]) -> bool:
    """Whether all actors of both kinds fit on ``nodes``, each on one node; exact, by dynamic programming over the nodes.

    Args:
        kinds: the actors; GPUs of each are a part of one, or a whole number.
        nodes: ``CPU`` and ``GPU`` of each.
    """
    a, b = kinds
    return _together([_beside(a, b, node.get("CPU", 0.0), node.get("GPU", 0.0)) for node in nodes], a.count)[-1] >= b.count


def _together(places: Iterable[Sequence[int]], most_a: int) -> list[int]:
    """Several places as one: the most b's beside 0, 1, ..., ``most_a`` a's, -1 where those a's do not fit.

    Each place is such a list of its own, which ends where its a's do.
    """
    most_b = [0] + [-1] * most_a
    for place in places:
        most_b = [
            max((most_b[i - k] + here for k, here in enumerate(place) if k <= i and min(most_b[i - k], here) >= 0), default=-1)
            for i in range(most_a + 1)
        ]
    return most_b


def _beside(a: Request, b: Request, cpus: float, gpus: float) -> list[int]:
    """The most b's on one node beside 0, 1, ... a's, at most all of either; -1 where those a's do not fit."""
    by_gpus = _on_gpus(a, b, int(gpus + SLACK))
    return [min(by_gpus[i], _times(b.cpus, cpus - i * a.cpus, b.count)) for i in range(_times(a.cpus, cpus, a.count) + 1)]


def _on_gpus(a: Request, b: Request, gpus: int) -> list[int]:
    """The same for the GPUs of one node alone."""
    shared = [[_times(b.gpus, 1 - k * a.gpus, b.count) for k in range(_times(a.gpus, 1, a.count) + 1)]] * gpus
    if 0 < a.gpus < 1 and 0 < b.gpus < 1:
        return _together(shared, a.count)
    if 0 < a.gpus < 1:  # b's take whole GPUs, or none: a's lie as close as they can
        taken = [-(-i // _times(a.gpus, 1, a.count)) for i in range(a.count + 1)]
    else:
        taken = [round(i * a.gpus) for i in range(a.count + 1)]
    free = [gpus - whole for whole in taken]
    if 0 < b.gpus < 1:
        return [min(b.count, left * _times(b.gpus, 1, b.count)) if left >= 0 else -1 for left in free]
    return [_times(b.gpus, left, b.count) if left >= 0 else -1 for left in free]


def _times(each: float, there: float, most: int) -> int:
    """How often ``each`` goes into ``there``, at most ``most`` times; -1 where there is less than nothing."""
    if there < -SLACK:
        return -1
    return min(most, int(there / each + SLACK)) if each > 0 else most
