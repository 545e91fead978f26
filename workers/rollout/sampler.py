"""A sampler for the HTTP server: one engine, many adapters, no environment and no episodes.

A plain class; `SamplerGroup` wraps it as Ray actors. What is sampled for whom is decided in `trainer.server`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray

from rlframe.seeding import derive_seed
from workers.engines.adapters import AdapterEngine, PromptScores, ScoreRequest, ServedAdapter
from workers.engines.protocol import Completion, SamplingParams
from workers.engines.registry import make_adapter_engine
from workers.pools import Pool
from workers.process import redirect_output
from workers.settings import Config


class SamplerWorker:
    """Owns an engine; all methods but the constructor belong to one asyncio loop."""

    def __init__(self, config: Config, model_path: str, index: int, log_file: str | None) -> None:
        redirect_output(log_file)
        self.engine: AdapterEngine = make_adapter_engine(config, model_path, index)

    async def start(self) -> None:
        """Start the engine."""
        await self.engine.start()

    async def sample(
        self, tokens: np.ndarray, params: SamplingParams, count: int, adapter: ServedAdapter | None
    ) -> list[Completion]:
        """``count`` continuations; with a seed, each has its own that follows from it."""
        each = [
            replace(params, seed=None if params.seed is None else derive_seed(params.seed, i) % 2**63) for i in range(count)
        ]
        if params.seed is not None and count == 1:
            each = [params]
        tasks = [asyncio.create_task(self.engine.sample(tokens, one, adapter)) for one in each]
        return list(await asyncio.gather(*tasks))

    async def score(self, tokens: np.ndarray, request: ScoreRequest, adapter: ServedAdapter | None) -> PromptScores:
        """Log-probabilities of a prompt."""
        return await self.engine.score(tokens, request, adapter)

    async def forget(self, adapter: ServedAdapter) -> None:
        """Free an adapter's memory."""
        await self.engine.forget(adapter)

    async def health(self) -> None:
        """Return if the engine can serve; raise EngineDeadError if not."""
        await self.engine.health()

    async def close(self) -> None:
        """End the engine."""
        await self.engine.close()


class SamplerGroup:
    """All samplers; a request goes to the one with the fewest in flight."""

    def __init__(self, workers: Sequence[Any]) -> None:
        """``workers``: handles of `SamplerWorker` actors."""
        self.workers = list(workers)
        self._load = [0] * len(self.workers)

    @classmethod
    def launch(cls, config: Config, model_path: str, log_dir: str | None, pool: Pool) -> SamplerGroup:
        """Create the actors in ``pool``; `start` starts their engines."""
        rollout = config.rollout
        remote: Any = ray.remote(SamplerWorker)
        options = {"num_cpus": rollout.cpus, "num_gpus": rollout.gpus, "max_concurrency": rollout.max_concurrency}
        return cls(
            [
                remote.options(**options, **pool.options(i)).remote(
                    config, model_path, i, log_dir and f"{log_dir}/sampler_{i}.log"
                )
                for i in range(rollout.workers)
            ]
        )

    async def start(self) -> None:
        """Start all engines."""
        await asyncio.gather(*(worker.start.remote() for worker in self.workers))

    async def sample(
        self, tokens: np.ndarray, params: SamplingParams, count: int, adapter: ServedAdapter | None
    ) -> list[Completion]:
        """See `SamplerWorker.sample`."""
        return await self._on_one(count, "sample", tokens, params, count, adapter)

    async def score(self, tokens: np.ndarray, request: ScoreRequest, adapter: ServedAdapter | None) -> PromptScores:
        """See `SamplerWorker.score`."""
        return await self._on_one(1, "score", tokens, request, adapter)

    async def forget(self, adapter: ServedAdapter) -> None:
        """Free an adapter's memory everywhere."""
        await asyncio.gather(*(worker.forget.remote(adapter) for worker in self.workers))

    async def health(self) -> None:
        """Return if every engine can serve; raise the first one's reason if not."""
        await asyncio.gather(*(worker.health.remote() for worker in self.workers))

    async def close(self) -> None:
        """End all engines."""
        await asyncio.gather(*(worker.close.remote() for worker in self.workers))

    async def _on_one(self, weight: int, method: str, *args: Any) -> Any:
        i = min(range(len(self.workers)), key=lambda w: self._load[w])
        self._load[i] += weight
        try:
            return await getattr(self.workers[i], method).remote(*args)
        finally:
            self._load[i] -= weight
