"""The driver's side of the rollout workers: one handle for all of them. What a worker does is in `workers.rollout.worker`."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import ray

from rlframe.config import Config
from rlframe.types import Batch, Prompt
from workers.environments.base import FatalRewardError
from workers.pools import Pool
from workers.rollout.engine import Completion, SamplingParams
from workers.rollout.worker import Collected, RolloutWorker

COLLECT_TIMEOUT_S = 1.0


class RolloutGroup:
    """All rollout workers; prompts go to the one with the fewest in flight."""

    def __init__(self, workers: list[Any]) -> None:
        """``workers``: handles of `RolloutWorker` actors."""
        self.workers = workers
        self.in_flight: list[set[int]] = [set() for _ in workers]

    @classmethod
    def launch(cls, config: Config, model_path: str, log_dir: str | None, pool: Pool) -> RolloutGroup:
        """Create the actors in ``pool``; `start` starts their engines."""
        rollout = config.rollout
        remote: Any = ray.remote(RolloutWorker)
        workers = [
            remote.options(
                num_cpus=rollout.cpus,
                num_gpus=rollout.gpus,
                max_concurrency=rollout.max_concurrency,
                max_restarts=0,
                **pool.options(i),
            ).remote(config, model_path, i, log_dir and f"{log_dir}/rollout_{i}.log", os.getcwd())
            for i in range(rollout.workers)
        ]
        return cls(workers)

    async def _all(self, method: str, *args: Any) -> list[Any]:
        return list(await asyncio.gather(*(getattr(worker, method).remote(*args) for worker in self.workers)))

    async def start(self) -> None:
        """Start all engines."""
        await self._all("start")

    async def submit(self, prompts: list[Prompt], slots: list[int], rollouts: int, sampling: SamplingParams) -> None:
        """Start ``rollouts`` episodes of every prompt; results come back under the slot's number through `collect`."""
        shares: list[tuple[list[Prompt], list[int]]] = [([], []) for _ in self.workers]
        for prompt, slot in zip(prompts, slots, strict=True):
            i = min(range(len(self.workers)), key=lambda w: len(self.in_flight[w]))
            self.in_flight[i].add(slot)
            shares[i][0].append(prompt)
            shares[i][1].append(slot)
        calls = [
            worker.submit.remote(share, numbers, rollouts, sampling)
            for worker, (share, numbers) in zip(self.workers, shares, strict=True)
            if share
        ]
        await asyncio.gather(*calls)

    async def collect(self, worker: int) -> Collected:
        """What one worker has finished; waits a while if there is nothing."""
        collected = await self.workers[worker].collect.remote(COLLECT_TIMEOUT_S)
        self.in_flight[worker].difference_update(collected.slots, (slot for slot, _ in collected.failures))
        return collected

    async def update_weights(self, update: Any) -> list[str]:
        """Serve new weights everywhere; the checksums of what is now served."""
        return await self._all("update_weights", update)

    async def evaluate(self, prompts: list[Prompt], sampling: SamplingParams) -> Batch:
        """One episode of every prompt, spread over the workers.

        Raises:
            FatalRewardError: the reward function failed.
        """
        shares = [prompts[i :: len(self.workers)] for i in range(len(self.workers))]
        calls = [worker.evaluate.remote(share, sampling) for worker, share in zip(self.workers, shares, strict=True) if share]
        try:
            return Batch.concat(await asyncio.gather(*calls))
        except FatalRewardError as error:
            raise getattr(error, "cause", error) from None  # Ray's copy of it has the worker's traceback in its message

    async def probe(self, tokens: np.ndarray, k: int) -> list[Completion]:
        """Every engine's log-probabilities of a fixed prompt."""
        return await self._all("probe", tokens, k)

    async def stats(self) -> list[dict[str, float]]:
        """Counters of every worker: ``tokens`` generated, ``busy_s``, ``in_flight``."""
        return await self._all("stats")

    async def close(self) -> None:
        """Shut the engines down."""
        await self._all("close")
