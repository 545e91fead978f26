"""The rollout worker: one engine, one environment, many episodes on one asyncio loop.

A plain class; `workers.rollout.group` runs it as a Ray actor. One remote call carries many prompts or many
trajectories, as flat arrays. `workers.rollout.episode` runs one episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlframe.seeding import derive_seed
from rlframe.types import Batch, Prompt, Trajectory
from workers.engines.protocol import Completion, Engine, EngineDeadError, SamplingParams, WeightUpdate
from workers.engines.registry import make_engine
from workers.environments.base import Environment
from workers.environments.registry import make_environment
from workers.environments.task_checks import eval_size
from workers.events import Event
from workers.faults import EpisodeFailed, Fault, Kind, describe
from workers.process import find_modules_in, redirect_output, without_garbage_collection
from workers.rollout.episode import LiveEpisode
from workers.settings import Config

PROBE_TOKENS = 8
"""Tokens sampled by `RolloutWorker.probe`."""
HEALTH_S = 60.0
"""Longest time that an engine's health check may take after an episode took too long."""
COUNTERS = ("tokens", "busy_s")
"""Counters of `RolloutWorker.stats`."""


@dataclass
class Collected:
    """What finished since the last `RolloutWorker.collect`; every slot appears once, in ``slots`` or in ``failures``.

    A piece whose ``last`` is False continues: the worker keeps its episode until `RolloutWorker.resume`.
    """

    slots: list[int]
    """Slots of the prompts of which at least one rollout succeeded, all of its rollouts having ended."""
    counts: list[int]
    """Trajectories of each of these; fewer than were asked for when some rollouts failed."""
    batch: Batch | None
    """All their trajectories, in the order of ``slots``; None when there are none."""
    failures: list[tuple[int, list[Fault]]]
    """Slots of the prompts of which no rollout succeeded, with the fault of each rollout."""
    lost: list[Fault] = field(default_factory=list)
    """Faults of the rollouts that the prompts in ``slots`` lack."""
    progress: int = 0
    """Episodes that have ended in this worker so far, in any way and for any purpose."""
    fatal: Fault | None = None
    """Why the run shall end, if it shall."""
    engine_fault: Fault | None = None
    """Why the engine can serve no more, if it cannot; prompts in flight then are in neither list, and never will be."""
    events: list[Event] = field(default_factory=list)
    """What the worker and its engine did since the last call, with ``log.events``."""

    def by_slot(self) -> Iterator[tuple[int, Batch]]:
        """Each slot with its own trajectories."""
        first = 0
        for slot, count in zip(self.slots, self.counts, strict=True):
            assert self.batch is not None
            yield slot, self.batch.select(range(first, first + count))
            first += count


@dataclass
class Evaluation:
    """Held-out episodes."""

    batch: Batch | None
    """Those that succeeded, in the order of their prompts; None when there are none."""
    faults: list[tuple[str, Fault]]
    """Prompt id and fault of the others."""


class RolloutWorker:
    """Owns an engine and runs episodes on it; all methods but the constructor belong to one asyncio loop.

    Args:
        config: the whole job.
        model_path: local Hugging Face folder of the base model and its tokenizer.
        index: number of this worker; engines of one run sample from different seeds.
        log_file: where this process and its children write stdout and stderr from now on; None: nothing is redirected.
        user_folder: where modules of the user are found besides the installed ones: the driver's current directory.
    """

    def __init__(
        self, config: Config, model_path: str, index: int = 0, log_file: str | None = None, user_folder: str | None = None
    ) -> None:
        redirect_output(log_file)
        if user_folder is not None:
            find_modules_in(user_folder)
        with without_garbage_collection():
            from transformers import AutoConfig, AutoTokenizer

        trust = config.model.trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True, trust_remote_code=trust)
        model = AutoConfig.from_pretrained(model_path, local_files_only=True, trust_remote_code=trust)
        self.config = config
        self.vocabulary = int(model.get_text_config().vocab_size)
        self.environment: Environment = make_environment(config.task, tokenizer, seed=config.seed, eval_size=eval_size(config))
        with without_garbage_collection():
            self.engine: Engine = make_engine(config, model_path, index)
        self._places = asyncio.Semaphore(config.rollout.max_concurrency)
        self._tasks: set[asyncio.Task] = set()
        self._waiting: dict[int, LiveEpisode] = {}
        """Episodes that continue when `resume` says so, by the slot of their last piece; nothing of them is sampled."""
        self._finished: list[tuple[int, list[Trajectory], list[Fault]]] = []
        self._news = asyncio.Event()
        self._counters = dict.fromkeys(COUNTERS, 0.0)
        self._index = index
        self._events: list[Event] = []
        self._in_flight = 0
        self._busy_since = 0.0
        self._progress = 0
        self._fatal: Fault | None = None
        self._engine_fault: Fault | None = None

    async def start(self) -> None:
        """Start the engine."""
        await self.engine.start()
        # What the libraries hold lives as long as this process; without this every full collection walks all of it again,
        # which costs a batch of short episodes a third of its time.
        gc.collect()
        gc.freeze()

    async def submit(self, prompts: Sequence[Prompt], slots: Sequence[int], rollouts: int, sampling: SamplingParams) -> None:
        """Start ``rollouts`` episodes of every prompt and return; `collect` brings them back under the prompt's slot."""
        segment_tokens = self.config.rollout.segment_tokens
        for prompt, slot in zip(prompts, slots, strict=True):
            self._start(slot, [self._live(prompt, n, sampling, segment_tokens) for n in range(rollouts)])

    async def resume(self, before: Sequence[int], slots: Sequence[int]) -> None:
        """Continue the episodes whose last pieces came under the slots ``before``; their next ones come under ``slots``."""
        for former, slot in zip(before, slots, strict=True):
            self._start(slot, [self._waiting.pop(former)])

    async def collect(self, timeout_s: float = 1.0) -> Collected:
        """Wait for at least one prompt to finish, or for the time limit, and return all that have finished."""
        if not self._finished and self._engine_fault is None:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                # Not wait_for: in Python 3.11 it swallows a cancellation that arrives together with the event.
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
        finished, self._finished = self._finished, []
        done = [(slot, trajectories) for slot, trajectories, _ in finished if trajectories]
        flat = [t for _, trajectories in done for t in trajectories]
        return Collected(
            slots=[slot for slot, _ in done],
            counts=[len(trajectories) for _, trajectories in done],
            batch=Batch.from_trajectories(flat) if flat else None,
            failures=[(slot, faults) for slot, trajectories, faults in finished if not trajectories],
            lost=[fault for _, trajectories, faults in finished if trajectories for fault in faults],
            progress=self._progress,
            fatal=self._fatal,
            engine_fault=self._engine_fault,
            events=self._take_events(),
        )

    async def evaluate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> Evaluation:
        """One episode of every prompt.

        Raises:
            EngineDeadError: the engine died.
        """
        results = await asyncio.gather(*(self._advance(self._live(prompt, 0, sampling, None), None) for prompt in prompts))
        if self._engine_fault is not None:
            raise EngineDeadError(self._engine_fault.reason)
        succeeded = [result for result in results if isinstance(result, Trajectory)]
        return Evaluation(
            batch=Batch.from_trajectories(succeeded) if succeeded else None,
            faults=[(p.id, result) for p, result in zip(prompts, results, strict=True) if isinstance(result, Fault)],
        )

    async def progress(self) -> int:
        """Episodes that have ended so far, in any way."""
        return self._progress

    async def update_weights(self, update: WeightUpdate, place: int = 0, places: int = 1) -> str:
        """Pause, load, continue; returns the engine's checksum of what it now serves.

        This is number ``place`` of the ``places`` workers that get the update together.
        After a failure the engine stays paused: nothing is sampled from weights of an unknown state.

        Raises:
            EngineDeadError: the update took longer than ``rollout.timeout_s``, or the engine died.
            ValueError: the update does not fit the engine's model.
        """
        if update.stream is not None:
            width = self.config.rollout.tensor_parallel_size
            update = replace(update, stream=replace(update.stream, first_rank=1 + place * width, ranks=1 + places * width))
        begin = time.time()
        try:
            async with asyncio.timeout(self.config.rollout.timeout_s):
                await self.engine.pause("abort" if self.config.rollout.on_update == "abort" else "keep")
                checksum = await self.engine.load_weights(update)
                await self.engine.resume()
        except TimeoutError as error:
            raise EngineDeadError(
                f"The update to version {update.version} took longer than rollout.timeout_s={self.config.rollout.timeout_s:g}."
            ) from error
        self._record("engine", "new weights", begin, version=update.version)
        return checksum

    async def probe(self, tokens: np.ndarray, k: int) -> Completion:
        """A short continuation of a fixed prompt at the rollout temperature, token by token as rollouts are sampled.

        Its log-probabilities show which weights are *computed with*; a checksum only shows which are stored.
        """
        room = self.config.rollout.max_model_len - len(tokens)
        sampling = SamplingParams(
            max_new_tokens=min(PROBE_TOKENS, room), temperature=self.config.rollout.temperature, logprobs=k, seed=0
        )
        async with asyncio.timeout(self.config.rollout.timeout_s):
            return await self.engine.generate(tokens, sampling)

    async def stats(self) -> dict[str, float]:
        """Since the last call: ``tokens`` sampled and ``busy_s`` with an episode running."""
        if self._in_flight:
            self._count_busy()
        counters, self._counters = self._counters, dict.fromkeys(COUNTERS, 0.0)
        return counters

    async def health(self) -> None:
        """Return if the engine can serve; raise EngineDeadError if not."""
        await self.engine.health()

    async def close(self) -> None:
        """End all episodes and the engine."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.environment.close()
        await self.engine.close()

    def _live(self, prompt: Prompt, number: int, sampling: SamplingParams, segment_tokens: int | None) -> LiveEpisode:
        """Rollout ``number`` of a prompt, not yet begun."""
        return LiveEpisode(
            self.engine,
            self.environment,
            prompt,
            replace(sampling, seed=derive_seed(self.config.seed, prompt.index, number)),
            max_model_len=self.config.rollout.max_model_len,
            vocabulary=self.vocabulary,
            on_reward_failure=self.config.task.on_reward_failure,
            segment_tokens=segment_tokens,
        )

    def _start(self, slot: int, episodes: list[LiveEpisode]) -> None:
        task = asyncio.create_task(self._run(slot, episodes))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, slot: int, episodes: list[LiveEpisode]) -> None:
        """The rollouts of one slot, to their ends or to the next cut."""
        results = await asyncio.gather(*(self._advance(episode, slot) for episode in episodes))
        trajectories = [result for result in results if isinstance(result, Trajectory)]
        if not all(trajectory.last for trajectory in trajectories):
            [self._waiting[slot]] = episodes
        if len(trajectories) == len(episodes) or self._engine_fault is None:
            self._finished.append((slot, trajectories, [result for result in results if isinstance(result, Fault)]))
        self._news.set()

    async def _advance(self, episode: LiveEpisode, slot: int | None) -> Trajectory | Fault:
        """The next piece of an episode (its trajectory, where it is not cut), or why there is none; of a slot or held out."""
        begin = time.time()
        result = await self._piece(episode)
        if isinstance(result, Fault):
            details: dict[str, Any] = {"fault": result.kind.value}
        else:
            versions = result.versions[result.action_mask].tolist()
            details = {"tokens": len(versions), "version": min(versions, default=None), "finish": result.finish}
            details |= {"turns": result.metadata["turns"]} if "turns" in result.metadata else {}
        self._record("rollout", "held-out episode" if slot is None else "episode", begin, slot=slot, **details)
        return result

    def _record(self, row: str, what: str, begin: float, **details: Any) -> None:
        if self.config.log.events:
            self._events.append(Event(f"{row}/{self._index}", what, begin, time.time(), details))

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    async def _piece(self, episode: LiveEpisode) -> Trajectory | Fault:
        self._enter()
        limit = self.config.rollout.timeout_s
        try:
            async with self._places, asyncio.timeout(limit):
                trajectory = await episode.advance()
            self._counters["tokens"] += float(trajectory.action_mask.sum())
            return trajectory
        except TimeoutError:  # of the line above: one of an environment or an engine comes as EpisodeFailed
            await self._check_engine()
            return Fault(Kind.TIMEOUT, f"the episode took longer than rollout.timeout_s={limit:g}")
        except EpisodeFailed as failure:
            if failure.fault.fatal:
                self._fatal = failure.fault
            return failure.fault
        except EngineDeadError as error:
            self._engine_fault = Fault(Kind.ENGINE, str(error))
            return self._engine_fault
        except Exception as error:
            return Fault(Kind.ENVIRONMENT, describe(error))
        finally:
            self._leave()

    async def _check_engine(self) -> None:
        """Tell an episode that is slow from an engine that hangs."""
        try:
            async with asyncio.timeout(HEALTH_S):
                await self.engine.health()
        except TimeoutError:
            self._engine_fault = Fault(Kind.ENGINE, f"The engine did not say within {HEALTH_S:g} s that it lives.")
        except Exception as error:  # an engine that cannot say that it lives serves no more
            self._engine_fault = Fault(Kind.ENGINE, str(error) if isinstance(error, EngineDeadError) else describe(error))

    def _enter(self) -> None:
        if self._in_flight == 0:
            self._busy_since = time.monotonic()
        self._in_flight += 1

    def _leave(self) -> None:
        self._in_flight -= 1
        self._progress += 1
        if self._in_flight == 0:
            self._count_busy()

    def _count_busy(self) -> None:
        now = time.monotonic()
        self._counters["busy_s"] += now - self._busy_since
        self._busy_since = now


class RolloutProcess(RolloutWorker):
    """A rollout worker as an actor: `start` raises what the constructor raised, whole; Ray would pass on a text of it."""

    def __init__(self, *arguments: Any) -> None:
        self._broken: Exception | None = None
        try:
            super().__init__(*arguments)
        except Exception as error:
            self._broken = error

    async def start(self) -> None:
        """Start the engine; the log has the traceback of what prevents that."""
        try:
            if self._broken is not None:
                raise self._broken
            await super().start()
        except Exception:
            traceback.print_exc()
            raise
