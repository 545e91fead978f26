"""The driver's side of the rollout workers: which prompts go to which. See `workers.rollout.worker` for what a worker does.

All turns and pieces of an episode run where its prompt was sent. A prompt whose worker was lost is sent again, to another
worker or to the same one once it is back, unless a piece of its episode was handed in: then the rest is lost.
`workers.supervised` defines when a worker is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from rlframe.types import Batch, Prompt
from workers.engines.protocol import Completion, SamplingParams
from workers.pools import Pool
from workers.rollout.worker import COUNTERS, Collected, Evaluation, RolloutProcess
from workers.settings import Config
from workers.supervised import MAX_LOSSES, Supervised, SupervisedGroup, WorkerLost, kill

COLLECT_TIMEOUT_S = 1.0
CALLS = 8
"""Remote calls that a worker answers at once, in addition to the prompts that it runs."""


@dataclass(frozen=True)
class Continuation:
    """The rest of an episode that was cut: where it waits, and what it continues."""

    worker: int
    """Worker that has it."""
    before: int
    """Slot of its last piece."""
    index: int
    """`Prompt.index` of its prompt."""


class RolloutGroup(SupervisedGroup):
    """All rollout workers; a prompt goes to the one with the fewest in flight, whose `Supervised.in_flight` has it by slot.

    Args:
        config: the whole job.
        spawn: makes the actor of a worker, given its number.
        log_dir: folder of the workers' logs.
        kill: ends an actor at once.
    """

    def __init__(
        self, config: Config, spawn: Callable[[int], Any], log_dir: str | None = None, kill: Callable[[Any], None] = kill
    ) -> None:
        super().__init__("Rollout worker", config, spawn, lambda i: _log(log_dir or "logs", i), kill)
        self._queue: dict[int, Prompt] = {}
        self._losses: Counter[int] = Counter()
        self._terms: tuple[Any, ...] = ()
        self._synced: dict[int, int] = {}
        """Restarts that a worker had had when it last took weights."""

    @classmethod
    def launch(cls, config: Config, model_path: str, log_dir: str | None, pool: Pool) -> RolloutGroup:
        """Create the actors in ``pool``; `start` starts their engines."""
        rollout, folder = config.rollout, os.getcwd()
        remote: Any = ray.remote(RolloutProcess)

        def spawn(i: int) -> Any:
            return remote.options(
                num_cpus=rollout.cpus,
                num_gpus=rollout.gpus,
                max_concurrency=CALLS,
                max_restarts=0,
                **pool.options(i),
            ).remote(config, model_path, i, log_dir and _log(log_dir, i), folder)

        return cls(config, spawn, log_dir)

    async def revive(self) -> None:
        """Start lost workers until all are up; for a group whose workers have nothing in flight that could be lost.

        Raises:
            WorkerLost: one has used up ``rollout.max_restarts``.
        """
        for worker in self.workers:
            while worker.failure is not None:
                if not worker.restarts_left:
                    raise worker.failure
                with contextlib.suppress(WorkerLost):  # it is in ``worker.failure``
                    await worker.restart()

    def progress(self) -> tuple[Any, ...]:
        """A value that changes when an episode ends, when a worker is lost or back, and while one starts."""
        if any(worker.starting for worker in self.workers):
            return (time.monotonic(),)
        return tuple((worker.progress, worker.restarts, worker.admitted) for worker in self.workers)

    def state(self) -> str:
        """The state of the workers as a clause: which are lost, how many prompts each has."""
        parts = [
            f"rollout worker {worker.index} " + (f"has {len(worker.in_flight)} prompts" if worker.admitted else "is not up")
            for worker in self.workers
        ]
        return ", ".join(parts) + (f", {len(self._queue)} prompts wait for a worker" if self._queue else "")

    async def submit(self, prompts: list[Prompt], slots: list[int], rollouts: int, sampling: SamplingParams) -> None:
        """Start ``rollouts`` episodes of every prompt; results come back under the slot's number through `collect`.

        While no worker is up, prompts wait here until one is.
        """
        self._queue |= dict(zip(slots, prompts, strict=True))
        self._terms = (rollouts, sampling)
        await self._send()

    async def _send(self) -> None:
        if not self.up():
            return
        queue, self._queue = self._queue, {}
        shares: dict[int, dict[int, Prompt]] = {}
        for slot, prompt in queue.items():
            worker = self.least_loaded()
            assert worker is not None
            worker.in_flight[slot] = prompt
            shares.setdefault(worker.index, {})[slot] = prompt
        await asyncio.gather(*(self._submit(self.workers[i], self.workers[i].restarts, share) for i, share in shares.items()))

    async def _submit(self, worker: Supervised, restarts: int, share: dict[int, Prompt]) -> None:
        if worker.restarts != restarts:
            return  # lost before this ran: `reissue` has taken the share back, and the actor now there must not get it too
        with contextlib.suppress(WorkerLost):  # `collect` sees the failure too
            await worker.call("submit", list(share.values()), list(share), *self._terms)

    async def resume(self, continuations: Sequence[Continuation], slots: Sequence[int]) -> None:
        """Continue episodes where they wait; their next pieces come under ``slots``."""
        shares: dict[int, dict[int, Continuation]] = {}
        for slot, continuation in zip(slots, continuations, strict=True):
            self.workers[continuation.worker].in_flight[slot] = continuation
            shares.setdefault(continuation.worker, {})[slot] = continuation
        await asyncio.gather(*(self._resume(self.workers[i], self.workers[i].restarts, share) for i, share in shares.items()))

    async def _resume(self, worker: Supervised, restarts: int, share: dict[int, Continuation]) -> None:
        if worker.restarts != restarts:
            return  # lost before this ran, and so is the share
        with contextlib.suppress(WorkerLost):  # `collect` sees the loss too
            await worker.call("resume", [continuation.before for continuation in share.values()], list(share))

    async def collect(self, worker: int) -> Collected:
        """What one worker has finished; waits a while if there is nothing.

        Raises:
            WorkerLost: the worker is lost, and everything that it had finished before was collected.
        """
        place = self.workers[worker]
        collected: Collected = await place.call(
            "collect", COLLECT_TIMEOUT_S, limit_s=COLLECT_TIMEOUT_S + self.config.rollout.timeout_s
        )
        for slot in (*collected.slots, *(slot for slot, _ in collected.failures)):
            del place.in_flight[slot]
            self._losses.pop(slot, None)
        place.progress = collected.progress
        if collected.engine_fault:
            place.lose(collected.engine_fault.reason, kind=collected.engine_fault.kind)
        return collected

    async def reissue(self, worker: int) -> tuple[int, list[int], list[int]]:
        """Send what a lost worker had to the others, or keep it until one is back.

        Returns:
            How many prompts that are, the slots of prompts that were given up, having seen `MAX_LOSSES` workers lost, and the
            slots of continuations, which are lost with the worker: their prompts must not be sent again, since earlier pieces
            were handed in.
        """
        place = self.workers[worker]
        orphans, place.in_flight = place.in_flight, {}
        rests = [slot for slot, orphan in orphans.items() if isinstance(orphan, Continuation)]
        for slot in rests:
            del orphans[slot]
        self._losses.update(orphans.keys())
        given_up = [slot for slot in orphans if self._losses[slot] >= MAX_LOSSES]
        for slot in given_up:
            del orphans[slot], self._losses[slot]
        self._queue = orphans | self._queue
        await self._send()
        return len(orphans), given_up, rests

    async def update_weights(self, update: Any, workers: Iterable[int]) -> dict[int, str]:
        """Serve new weights on ``workers``; the checksums of what each of them now serves, without those that are lost."""
        order = list(workers)

        async def ask(place: int, i: int) -> list[tuple[int, str]]:
            restarts = self.workers[i].restarts
            with contextlib.suppress(WorkerLost):
                checksum = await self.workers[i].call("update_weights", update, place, len(order))
                self._synced[i] = restarts
                return [(i, checksum)]
            return []

        answers = await asyncio.gather(*(ask(place, i) for place, i in enumerate(order)))
        return dict(pair for pairs in answers for pair in pairs)

    async def probe(self, tokens: np.ndarray, k: int, workers: Iterable[int]) -> dict[int, Completion]:
        """The log-probabilities of a fixed prompt on each of ``workers``, without those that are lost."""
        return await self.each("probe", tokens, k, workers=self._current(workers))

    async def admit(self, workers: Iterable[int]) -> None:
        """Let prompts go to ``workers``, which were found to serve the current weights."""
        await super().admit(self._current(workers))
        await self._send()

    def _current(self, workers: Iterable[int]) -> list[int]:
        """Those of ``workers`` whose actor was not started again since it took weights: a new one serves the base model's."""
        return [i for i in workers if self.workers[i].restarts == self._synced.get(i, 0)]

    async def evaluate(self, prompts: list[Prompt], sampling: SamplingParams, wait: bool = True) -> Evaluation:
        """One episode of every prompt, spread over the workers; a share whose worker is lost goes to another one.

        Args:
            prompts: the problems.
            sampling: how answers are sampled.
            wait: without a worker, wait until one is restarted.

        Raises:
            WorkerLost: no worker is up, and none will be restarted.
        """
        shares = [prompts[i :: len(self.workers)] for i in range(len(self.workers))]
        parts = await asyncio.gather(*(self._evaluate(i, s, sampling, wait) for i, s in enumerate(shares) if s))
        batches = [part.batch for part in parts if part.batch is not None]
        return Evaluation(Batch.concat(batches) if batches else None, [fault for part in parts for fault in part.faults])

    async def _evaluate(self, first: int, share: list[Prompt], sampling: SamplingParams, wait: bool) -> Evaluation:
        while True:
            while not (up := self.up()):
                if not wait:
                    raise WorkerLost("No worker is up to answer held-out problems.")
                await self.wait_for_change()
            worker = self.workers[first if first in up else up[first % len(up)]]
            with contextlib.suppress(WorkerLost):
                return await self._answers(worker, share, sampling)

    async def _answers(self, worker: Supervised, share: list[Prompt], sampling: SamplingParams) -> Evaluation:
        """All answers of one worker. Each of its episodes has a time limit, so they have none together; a worker that is gone
        is found by asking how far it is.
        """
        call = asyncio.ensure_future(worker.call("evaluate", share, sampling, limit_s=math.inf))
        try:
            while not (await asyncio.wait([call], timeout=COLLECT_TIMEOUT_S))[0]:
                worker.progress = await worker.call("progress")
            return await call
        finally:
            call.cancel()

    async def stats(self) -> list[dict[str, float]]:
        """Counters of every worker: ``tokens`` generated, ``busy_s``; zeros of those that are lost."""
        stats = await self.each("stats", workers=self.up())
        return [stats.get(worker.index, dict.fromkeys(COUNTERS, 0.0)) for worker in self.workers]


def _log(log_dir: str, worker: int) -> str:
    return f"{log_dir}/rollout_{worker}.log"
