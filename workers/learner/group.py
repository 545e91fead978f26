"""The driver's side of the learner: one handle for all ranks. See `workers.learner.rank` for what a rank does."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Self

import numpy as np
import ray

from rlframe.files import Entry
from rlframe.metrics import Metrics
from rlframe.types import Batch
from workers.learner.rank import LearnerRank
from workers.learner.shared import SharedBatch
from workers.pools import Pool
from workers.settings import Config


class LearnerGroup:
    """All learner ranks; each call runs on every rank at once and merges their results."""

    rank_class: type = LearnerRank
    """What runs on every rank."""

    def __init__(self, ranks: list[Any]) -> None:
        """``ranks``: handles of `LearnerRank` actors, in rank order."""
        self.ranks = ranks

    @classmethod
    def launch(cls, config: Config, model_path: str, log_dir: str | None, pool: Pool, critics: tuple[str, ...]) -> Self:
        """Create the actors in ``pool``; `start` makes them a group. ``critics``: see `LearnerRank`."""
        actor = config.actor
        remote: Any = ray.remote(concurrency_groups={"files": 1})(cls.rank_class)  # type: ignore[call-overload]
        ranks = [
            remote.options(
                num_cpus=actor.cpus,
                num_gpus=actor.gpus,
                runtime_env={"env_vars": _environment(config)},
                **pool.options(rank),
            ).remote(config, model_path, rank, log_dir and f"{log_dir}/learner_{rank}.log", critics, os.getcwd())
            for rank in range(actor.ranks)
        ]
        return cls(ranks)

    def put(self, batch: Any) -> Any:
        """Put a batch where all ranks can read it."""
        return ray.put(batch)

    def put_columns(self, batch: Batch) -> SharedBatch:
        """The batch of a step, of which each role reads its columns and none is put twice."""
        return SharedBatch(batch, self.put)

    async def _all(self, method: str, *args: Any) -> list[Any]:
        return list(await asyncio.gather(*(getattr(rank, method).remote(*args) for rank in self.ranks)))

    async def start(self) -> None:
        """Form the process group and build the sessions."""
        address = await self.ranks[0].rendezvous.remote()
        await self._all("start", address)

    async def values(self, batch: SharedBatch) -> tuple[np.ndarray, np.ndarray]:
        """Values [N] and bootstrap values [B] of the whole batch."""
        parts = await self._all("values", *batch.parts("critic"))
        return np.concatenate([values for values, _ in parts]), np.concatenate([last for _, last in parts])

    async def update_critic(self, batch: SharedBatch) -> Metrics:
        """One critic step."""
        return Metrics.merge(await self._all("update_critic", *batch.parts("critic")))

    async def update_actor(self, batch: SharedBatch) -> Metrics:
        """One policy step."""
        return Metrics.merge(await self._all("update_actor", *batch.parts("actor")))

    async def weight_update(self, version: int, mode: str, dtype: str, exact: bool = False) -> tuple[Any, str]:
        """A reference to the weights (they go from rank 0 to the rollout workers, not through here) and their checksum."""
        refs = [rank.weight_update.options(num_returns=2).remote(version, mode, dtype, exact) for rank in self.ranks]
        checksums = await asyncio.gather(*(checksum for _, checksum in refs))
        return refs[0][0], checksums[0]

    async def send_weights(self, places: int) -> None:
        """Send the weights that `weight_update` announced to ``places`` rollout workers, from rank to engine over NCCL."""
        await self.ranks[0].send_weights.remote(places)

    async def logprobs(self, batch: Any, temperature: float) -> dict[str, np.ndarray]:
        """The policy's log-probabilities and entropy of every token of ``batch``, which is what `put` returned."""
        parts = await self._all("logprobs", batch, temperature)
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    async def dead(self, timeout_s: float = 10.0) -> list[int]:
        """Ranks whose process is gone. One that is busy for longer than ``timeout_s`` counts as alive."""
        calls = [asyncio.ensure_future(_reached(rank)) for rank in self.ranks]
        done, waiting = await asyncio.wait(calls, timeout=timeout_s)
        for call in waiting:
            call.cancel()
        return [i for i, call in enumerate(calls) if call in done and not call.result()]

    async def close(self) -> None:
        """Shut the process group down."""
        await self._all("close")

    async def snapshot(self) -> None:
        """Every rank copies its part of a checkpoint to host memory."""
        await self._all("snapshot")

    async def write(self, directory: str) -> dict[str, Entry]:
        """Every rank writes its copy under ``directory`` (a path that all ranks and the driver share) while training continues.

        Returns:
            Size and hash of every file, by its path inside ``directory``.
        """
        calls = [rank.write.options(concurrency_group="files").remote(directory) for rank in self.ranks]
        return {name: entry for part in await asyncio.gather(*calls) for name, entry in part.items()}

    async def load(self, directory: str) -> None:
        """Every rank restores from ``directory``."""
        await self._all("load", directory)


def _environment(config: Config) -> dict[str, str]:
    """Environment variables of a rank's process."""
    shared = {"OMP_NUM_THREADS": str(config.actor.threads), "HF_HUB_OFFLINE": "1"}
    if config.actor.gpus:
        return shared
    # Every pass allocates the same large tensors. glibc would return them to the system each time, and the system clears every
    # page before it gives it out again: a sixth of a step of SmolLM2.
    return shared | {"MALLOC_MMAP_THRESHOLD_": str(4 * 2**30), "MALLOC_TRIM_THRESHOLD_": str(64 * 2**30)}


async def _reached(rank: Any) -> bool:
    """Whether a rank answers; False if its process is gone."""
    try:
        await rank.address.remote()
    except ray.exceptions.RayActorError:
        return False
    return True
