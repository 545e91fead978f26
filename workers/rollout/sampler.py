"""A sampler for the HTTP server: one engine, many adapters, no environment and no episodes.

A plain class; `SamplerGroup` wraps it as Ray actors. `trainer.server` decides what to sample for which client.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import ray

from rlframe.seeding import derive_seed
from workers.engines.adapters import AdapterEngine, PromptScores, ScoreRequest, ServedAdapter
from workers.engines.protocol import Completion, EngineDeadError, SamplingParams
from workers.engines.registry import make_adapter_engine
from workers.faults import describe
from workers.pools import Pool
from workers.process import redirect_output
from workers.settings import Config
from workers.supervised import MAX_LOSSES, Supervised, SupervisedGroup, WorkerLost, kill

logger = logging.getLogger("rlframe.server")

CALLS = 8
"""Remote calls that a sampler answers at once, beside requests."""
WATCH_S = 2.0
"""Seconds between health checks of a sampler."""


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
        """``count`` continuations; with a seed, each has its own that follows from it.

        Raises:
            EngineDeadError: the engine can serve no more.
        """
        each = [
            replace(params, seed=None if params.seed is None else derive_seed(params.seed, i) % 2**63) for i in range(count)
        ]
        if params.seed is not None and count == 1:
            each = [params]
        async with self._alive():
            tasks = [asyncio.create_task(self.engine.sample(tokens, one, adapter)) for one in each]
            return list(await asyncio.gather(*tasks))

    async def score(self, tokens: np.ndarray, request: ScoreRequest, adapter: ServedAdapter | None) -> PromptScores:
        """Log-probabilities of a prompt; raises as `sample` does."""
        async with self._alive():
            return await self.engine.score(tokens, request, adapter)

    @asynccontextmanager
    async def _alive(self) -> AsyncIterator[None]:
        """Raise EngineDeadError for any failure inside when the engine is dead."""
        try:
            yield
        except (ValueError, EngineDeadError):
            raise
        except Exception:
            await self.engine.health()
            raise

    async def forget(self, adapter: ServedAdapter) -> None:
        """Free an adapter's memory."""
        await self.engine.forget(adapter)

    async def health(self) -> None:
        """Return if the engine can serve; raise EngineDeadError if not."""
        await self.engine.health()

    async def close(self) -> None:
        """End the engine."""
        await self.engine.close()


class NoSampler(RuntimeError):
    """A request cannot be answered by any sampler; the message is one sentence for the client."""


class SamplerGroup(SupervisedGroup):
    """All samplers; a request goes to the one with the fewest samples in flight.

    Sampling has no effect but its answer, so a request whose sampler was lost goes to another one. A sampler serves the
    frozen base model and reads an adapter when the first request under it comes, so one that was started again serves what
    the one before it did.

    Args:
        config: the whole job.
        spawn: makes the actor of a sampler, given its number.
        log_dir: folder of the samplers' logs.
        kill: ends an actor at once.
    """

    def __init__(
        self, config: Config, spawn: Callable[[int], Any], log_dir: str | None = None, kill: Callable[[Any], None] = kill
    ) -> None:
        super().__init__("Sampler", config, spawn, lambda i: _log(log_dir or "logs", i), kill)
        self._room = [asyncio.Semaphore(config.rollout.max_concurrency) for _ in self.workers]
        self._numbers = itertools.count()
        self._watchers: list[asyncio.Task[None]] = []

    @classmethod
    def launch(cls, config: Config, model_path: str, log_dir: str | None, pool: Pool) -> SamplerGroup:
        """Create the actors in ``pool``; `start` starts their engines."""
        rollout = config.rollout
        remote: Any = ray.remote(SamplerWorker)

        def spawn(i: int) -> Any:
            return remote.options(
                num_cpus=rollout.cpus,
                num_gpus=rollout.gpus,
                max_concurrency=rollout.max_concurrency + CALLS,
                max_restarts=0,
                **pool.options(i),
            ).remote(config, model_path, i, log_dir and _log(log_dir, i))

        return cls(config, spawn, log_dir)

    async def start(self) -> None:
        """Start all engines, and from then on keep them up; raises as `Supervised.start` does."""
        await super().start()
        await self.admit(range(len(self.workers)))
        self._watchers = [asyncio.create_task(self._watch(worker)) for worker in self.workers]

    async def sample(
        self, tokens: np.ndarray, params: SamplingParams, count: int, adapter: ServedAdapter | None
    ) -> list[Completion]:
        """See `SamplerWorker.sample`.

        Raises:
            NoSampler: none is left, or this request is considered the cause of their death.
        """
        return await self._on_one(count, "sample", tokens, params, count, adapter)

    async def score(self, tokens: np.ndarray, request: ScoreRequest, adapter: ServedAdapter | None) -> PromptScores:
        """Score a prompt on one sampler; raises as `sample` does."""
        return await self._on_one(1, "score", tokens, request, adapter)

    async def forget(self, adapter: ServedAdapter) -> None:
        """Free an adapter's memory everywhere; a sampler that is lost or starts has none."""
        await self.each("forget", adapter, workers=self.up())

    async def health(self) -> None:
        """Return as soon as one sampler says that it can serve; raise `NoSampler` if none does."""
        calls = [asyncio.ensure_future(self.workers[i].call("health")) for i in self.up()]
        try:
            for first in asyncio.as_completed(calls):
                with contextlib.suppress(Exception):
                    return await first
        finally:
            for call in calls:
                call.cancel()
        raise NoSampler(self._none_left() if all(worker.gone for worker in self.workers) else "No sampler is up.")

    async def close(self) -> None:
        """End all engines."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await super().close()

    async def _on_one(self, samples: int, method: str, *args: Any) -> Any:
        """The answer of one sampler to a request that counts as ``samples``."""
        losses = 0
        while losses < MAX_LOSSES:
            worker = self.least_loaded()
            if worker is None:
                if all(worker.gone for worker in self.workers):
                    raise NoSampler(self._none_left())
                await self.wait_for_change()
                continue
            numbers = [next(self._numbers) for _ in range(samples)]
            worker.in_flight.update(dict.fromkeys(numbers, method))
            try:
                async with self._room[worker.index]:
                    if worker.admitted:
                        return await worker.call(method, *args, limit_s=math.inf)
            except WorkerLost:
                losses += 1
            finally:
                for number in numbers:
                    del worker.in_flight[number]
        raise NoSampler(f"The {losses} samplers that had this request were lost; it is taken for the cause and given up.")

    async def _watch(self, worker: Supervised) -> None:
        """Check a sampler's health periodically, and restart it when it is lost, as often as allowed.

        Requests have no time limit of their own, since one may ask for many samples: a sampler that hangs is found here.
        """

        async def ready(i: int) -> None:
            await self.admit([i])

        def say(failure: WorkerLost) -> None:
            logger.warning("%s It is started again; its requests go to other samplers.", failure)

        while True:
            try:
                await worker.call("health")
                await asyncio.wait_for(worker.lost.wait(), WATCH_S)
            except TimeoutError:
                continue
            except WorkerLost:
                pass
            except Exception as error:
                worker.lose(f"it is not healthy: {describe(error)}")
            last = await self.restart_until_ready(worker.index, ready, say)
            if last is not None:
                logger.error("%s It has used up rollout.max_restarts=%d.", last, self.config.rollout.max_restarts)
                return

    def _none_left(self) -> str:
        limit = f"rollout.max_restarts={self.config.rollout.max_restarts}"
        return f"No sampler is left, each having used up {limit}; training continues, sampling needs the server started again."


def _log(log_dir: str, sampler: int) -> str:
    return f"{log_dir}/sampler_{sampler}.log"
