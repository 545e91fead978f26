"""The ranks that share one backbone, and the few collectives that sessions need beside FSDP's own.

One rank without a process group is the same object with collectives that do nothing. No model and no optimiser lives here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlframe.config import ConfigError


@dataclass(frozen=True)
class Ranks:
    """One rank's view of its group."""

    rank: int = 0
    """This process within the group."""
    size: int = 1
    """Processes of the group."""
    group: Any = None
    """Process group of the device's backend."""
    control: Any = None
    """gloo group for flags, so that agreeing never waits for the accelerator."""

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> Ranks:
        """The ranks of a one-dimensional mesh; a single rank without one.

        Raises:
            ConfigError: the mesh has more than one dimension.
        """
        if mesh is None:
            return cls()
        if mesh.ndim != 1:
            raise ConfigError(f"A backbone is sharded over one dimension, but its device mesh has {mesh.ndim}.")
        group = mesh.get_group()
        ranks = dist.get_process_group_ranks(group)
        control = (
            group
            if dist.get_backend(group) == "gloo"
            else dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        )
        return cls(rank=mesh.get_local_rank(), size=mesh.size(), group=group, control=control)

    def rows(self, count: int) -> slice:
        """Rows of a tensor with ``count`` rows that this rank holds under FSDP2's sharding of dimension 0."""
        chunk = -(-count // self.size)
        return slice(min(self.rank * chunk, count), min((self.rank + 1) * chunk, count))

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def maximum(self, values: list[int]) -> list[int]:
        """Elementwise maximum of small CPU integers over the ranks."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control)
        return tensor.tolist()

    def total(self, value: int) -> int:
        """Sum of one integer over the ranks, modulo 2**64."""
        if self.size == 1:
            return value % 2**64
        # gloo adds int64 with wrap-around, which is addition modulo 2**64.
        tensor = torch.tensor([(value + 2**63) % 2**64 - 2**63], dtype=torch.int64)
        dist.all_reduce(tensor, group=self.control)
        return int(tensor.item()) % 2**64

    def union(self, names: list[str]) -> list[str]:
        """All names that any rank has, sorted; a few short ones."""
        if self.size == 1:
            return sorted(names)
        text = json.dumps(sorted(names)).encode()
        (length,) = self.maximum([len(text)])
        mine = torch.tensor(list(text.ljust(length)), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self.control)
        return sorted({name for part in parts for name in json.loads(bytes(part.tolist()))})

    def agree(self, failure: Exception | None, *, count: int = 0) -> int:
        """Raise on every rank if any rank failed, so that no rank waits in a collective for one that gave up.

        Args:
            failure: what went wrong on this rank, or None.
            count: a number to compare.

        Returns:
            The largest ``count`` of all ranks.

        Raises:
            Exception: ``failure`` itself on the rank that failed.
            RuntimeError: on the other ranks.
        """
        failed, largest = self.maximum([int(failure is not None), count])
        if failure is not None:
            raise failure
        if failed:
            raise RuntimeError("Another rank failed in this call; its own message says why, and nothing of the call was kept.")
        return largest

    def together(self, run: Callable[[], None]) -> None:
        """Run something without collectives on every rank, and raise on every rank if any failed; see `agree`."""
        failure = None
        try:
            run()
        except Exception as error:
            failure = error
        self.agree(failure)
