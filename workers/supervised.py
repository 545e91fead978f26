"""Groups of actors that cannot hang their caller: routing to the least loaded, exclusion of a lost one, restart.

An actor is lost when its process or its node is gone, when its engine is dead, or when it does not answer within the time
limit of a call. It is then killed, so that nothing more can come from it, and gets no work until
`SupervisedGroup.restart_until_ready` has replaced it, wherever the cluster has room, and its replacement is admitted. Which
work goes where, and what becomes of the work of a lost actor, is decided in `workers.rollout.group` (prompts) and
`workers.rollout.sampler` (requests).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from workers.engines.protocol import EngineDeadError
from workers.faults import Kind, describe
from workers.settings import Config

CLOSE_S = 10.0
"""How long an actor may take to end by itself."""
MAX_LOSSES = 3
"""Actors that a piece of work may see lost while they have it; then it is considered the cause, and given up."""


class WorkerLost(RuntimeError):
    """A supervised actor is lost; the message says which one and why, in one sentence."""

    def __init__(self, reason: str, kind: Kind = Kind.WORKER_LOST) -> None:
        super().__init__(reason)
        self.kind = kind


class StartFailed(RuntimeError):
    """A process of the run cannot start, and a retry would fail too; the message has its own reason."""


async def started(who: str, log: str, start: Awaitable[None]) -> None:
    """Await the start of ``who``, whose output is in ``log``.

    Raises:
        StartFailed: it failed.
        WorkerLost: the process was lost while it started; another one may do better.
    """
    try:
        await start
    except RayActorError as error:
        if not error.actor_init_failed:
            raise WorkerLost(f"{who} was lost while it started: {first_line(error)}.") from error
        reason = str(error).strip().rpartition("\n")[2]  # a traceback: the class could not even be imported there
        raise StartFailed(f"{who} cannot start: {reason.rstrip('.')}. Its log is {log}.") from error
    except WorkerLost:
        raise
    except Exception as error:
        raise StartFailed(f"{who} cannot start: {describe(error).rstrip('.')}. Its log is {log}.") from error


def first_line(error: BaseException) -> str:
    """Of the message, or the name of the exception if it has none."""
    return (str(error).partition("\n")[0] or type(error).__name__).rstrip(".")


def kill(actor: Any) -> None:
    """Kill a Ray actor that may be dead already."""
    with contextlib.suppress(RayError):
        ray.kill(actor, no_restart=True)


class Supervised:
    """The place of one actor, whichever fills it now.

    Args:
        who: what the actor is called in sentences, with its number.
        index: its number.
        spawn: makes the actor for that number; its handle is returned before the actor has started.
        config: the time limits and the number of restarts.
        kill: ends an actor at once.
    """

    def __init__(
        self, who: str, index: int, spawn: Callable[[int], Any], config: Config, kill: Callable[[Any], None] = kill
    ) -> None:
        self.who, self.index, self._spawn, self._config, self._kill = who, index, spawn, config, kill
        self._actor = spawn(index)
        self.in_flight: dict[int, Any] = {}
        """Work that the actor has, by number; its load is how much that is."""
        self.failure: WorkerLost | None = None
        """Why the actor is lost; None: it is not."""
        self.lost = asyncio.Event()
        """Set while the actor is lost."""
        self.admitted = False
        """Whether it is known to serve the current weights, so that work may go to it."""
        self.progress = 0
        """Pieces of work that have ended in the actor, when it was last heard."""
        self.starting = False
        """Whether it is being started, which has a time limit of its own."""
        self.restarts = 0
        self.gone = False
        """Whether it will not be started again."""

    @property
    def restarts_left(self) -> int:
        """How often it may still be started again."""
        return self._config.rollout.max_restarts - self.restarts

    async def call(self, method: str, *args: Any, limit_s: float | None = None) -> Any:
        """Call a method of the actor.

        Args:
            method: its name.
            args: its arguments.
            limit_s: longest time that an answer may take, seconds; None: ``rollout.timeout_s``.

        Raises:
            WorkerLost: the actor is lost, before this call or by it, or it is being started again.
            Exception: what the method raised, if the engine lives.
        """
        limit = self._config.rollout.timeout_s if limit_s is None else limit_s
        if self.failure is not None:
            raise self.failure
        if self.starting and method != "start":  # a call that was meant for the actor before it
            raise self._replaced()
        actor = self._actor
        try:
            async with asyncio.timeout(limit):
                return await self._unless_lost(getattr(actor, method).remote(*args))
        except TimeoutError as error:
            if isinstance(error, RayTaskError):
                raise  # of the method itself
            raise self.lose(f"it did not answer {method}() within {limit:g} s", actor) from error
        except EngineDeadError as error:  # Ray's copy of it has the worker's traceback in its message
            raise self.lose(str(getattr(error, "cause", error)), actor, Kind.ENGINE) from error
        except RayTaskError:
            raise
        except RayError as error:
            raise self.lose(first_line(error), actor) from error

    async def _unless_lost(self, call: Awaitable[Any]) -> Any:
        """The answer; a call that finds the actor lost ends the wait of all others at once, whenever Ray hears of it."""
        answer, lost = asyncio.ensure_future(call), asyncio.ensure_future(self.lost.wait())
        try:
            await asyncio.wait({answer, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise self.failure or self._replaced()
            return answer.result()
        finally:
            answer.cancel()
            lost.cancel()

    def _replaced(self) -> WorkerLost:
        return WorkerLost(f"{self.who} was replaced during a call.")

    def lose(self, reason: str, actor: Any = None, kind: Kind = Kind.WORKER_LOST) -> WorkerLost:
        """Give the actor up and kill what is left of it; ``actor``: only if it is still this one. Returns the failure."""
        if self.failure is None and actor in (None, self._actor):
            self.failure = WorkerLost(f"{self.who} is lost: {reason.rstrip('.')}.", kind)
            self.admitted = False
            self.lost.set()
            self._kill(self._actor)
        return self.failure or self._replaced()

    async def start(self, log: str) -> None:
        """Start the engine for the first time.

        Raises:
            StartFailed: it cannot start, or did not within ``cluster.startup_timeout_s``.
            WorkerLost: its process or node was lost.
        """
        limit = self._config.cluster.startup_timeout_s
        try:
            async with asyncio.timeout(limit):
                await started(self.who, log, self._actor.start.remote())
        except TimeoutError:
            reason = f"{self.who} did not start within cluster.startup_timeout_s={limit:g}. Its log is {log}."
            raise StartFailed(reason) from None

    async def restart(self) -> None:
        """Put a new actor in place of a lost one, and start its engine.

        Raises:
            WorkerLost: it did not start within ``cluster.startup_timeout_s``, or failed to.
        """
        self.restarts += 1
        self._actor, self.failure, self.starting = self._spawn(self.index), None, True
        self.lost.clear()
        try:
            await self.call("start", limit_s=self._config.cluster.startup_timeout_s)
        except WorkerLost:
            raise
        except Exception as error:
            raise self.lose(f"its engine did not start: {describe(error)}", kind=Kind.ENGINE) from error
        finally:
            self.starting = False

    async def close(self) -> None:
        """End the engine and the actor."""
        with contextlib.suppress(Exception):
            await self.call("close", limit_s=CLOSE_S)
        self.lose("it was closed")


class SupervisedGroup:
    """``rollout.workers`` actors of one kind.

    Args:
        who: what one of them is called in sentences.
        config: the whole job.
        spawn: makes the actor of a place, given its number.
        log: path of an actor's log, given its number.
        kill: ends an actor at once.
    """

    def __init__(
        self,
        who: str,
        config: Config,
        spawn: Callable[[int], Any],
        log: Callable[[int], str],
        kill: Callable[[Any], None] = kill,
    ) -> None:
        self.config, self.log = config, log
        self.workers = [Supervised(f"{who} {i}", i, spawn, config, kill) for i in range(config.rollout.workers)]
        self._changed = asyncio.Event()
        """Set when an actor was admitted, or will not be started again."""

    async def start(self) -> None:
        """Start all engines; raises as `Supervised.start` does."""
        await asyncio.gather(*(worker.start(self.log(worker.index)) for worker in self.workers))

    def up(self) -> list[int]:
        """Actors that serve the current weights and take work."""
        return [worker.index for worker in self.workers if worker.admitted]

    def least_loaded(self) -> Supervised | None:
        """The actor with the least in flight of those that are up; None if none is."""
        return min((worker for worker in self.workers if worker.admitted), key=lambda w: len(w.in_flight), default=None)

    async def admit(self, workers: Iterable[int]) -> None:
        """Let work go to ``workers``, which were found to serve the current weights."""
        for i in workers:
            self.workers[i].admitted = self.workers[i].failure is None
        self._changed.set()

    async def wait_for_change(self) -> None:
        """Wait until an actor is admitted, or one is not started again."""
        self._changed.clear()
        await self._changed.wait()

    async def restart_until_ready(
        self, worker: int, ready: Callable[[int], Awaitable[None]], say: Callable[[WorkerLost], None]
    ) -> WorkerLost | None:
        """Start a lost actor again, as often as ``rollout.max_restarts`` allows, until it is ready for work.

        Args:
            worker: its number.
            ready: brings the new actor to the current weights and admits it.
            say: hears before each attempt why the actor before it was lost.

        Returns:
            None when it is back; otherwise the last failure, and it will not be started again.
        """
        place = self.workers[worker]
        assert place.failure is not None
        failure = place.failure
        while place.restarts_left > 0:
            say(failure)
            try:
                await place.restart()
                await ready(worker)
                return None
            except WorkerLost as again:
                failure = again
        place.gone = True
        self._changed.set()
        return failure

    async def each(self, method: str, *args: Any, workers: Iterable[int]) -> dict[int, Any]:
        """The answers of those of ``workers`` that are not lost, before or by this call."""

        async def ask(i: int) -> list[tuple[int, Any]]:
            with contextlib.suppress(WorkerLost):
                return [(i, await self.workers[i].call(method, *args))]
            return []

        return dict(pair for pairs in await asyncio.gather(*map(ask, workers)) for pair in pairs)

    async def close(self) -> None:
        """Shut the engines down."""
        await asyncio.gather(*(worker.close() for worker in self.workers))
