"""One rollout worker as the driver sees it: calls that cannot hang, and what is done when the worker is lost.

A worker is lost when its process or its node is gone, when its engine is dead, or when it does not answer within the time
limit of a call. It is then killed, so that nothing comes from it any more, and `Supervised.restart` puts a new one in its
place, wherever the cluster has room. Which prompts go where is decided in `workers.rollout.group`; which weights a new worker
gets before its first prompt, by the controller.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rlframe.types import Prompt
from workers.engines.protocol import EngineDeadError
from workers.faults import Kind, describe
from workers.settings import Config

CLOSE_S = 10.0
"""How long a worker may take to end by itself."""


class WorkerLost(RuntimeError):
    """A rollout worker serves no more; the message says which one and why, in one sentence."""

    def __init__(self, reason: str, kind: Kind = Kind.WORKER_LOST) -> None:
        super().__init__(reason)
        self.kind = kind


class StartFailed(RuntimeError):
    """A process of the run cannot start, and would not the next time; the message has its own reason."""


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


class Supervised:
    """The place of one rollout worker, whichever actor fills it now.

    Args:
        index: number of the worker.
        spawn: makes the actor for that number; its handle is returned before the actor has started.
        config: the time limits and the number of restarts.
    """

    def __init__(self, index: int, spawn: Callable[[int], Any], config: Config) -> None:
        self.index, self._spawn, self._config = index, spawn, config
        self._actor = spawn(index)
        self.in_flight: dict[int, Prompt] = {}
        """Prompts that the worker has, by slot."""
        self.loss: WorkerLost | None = None
        """Why the worker is lost; None: it is not."""
        self.admitted = False
        """Whether it is known to serve the current weights, so that prompts may go to it."""
        self.progress = 0
        """Episodes that have ended in the actor, when it was last heard."""
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
        """Call a method of the worker.

        Args:
            method: name of a method of `RolloutWorker`.
            args: its arguments.
            limit_s: longest time that an answer may take, seconds; None: ``rollout.timeout_s``.

        Raises:
            WorkerLost: the worker is lost, before this call or by it.
            Exception: what the method raised, if the engine lives.
        """
        limit = self._config.rollout.timeout_s if limit_s is None else limit_s
        if self.loss is not None:
            raise self.loss
        actor = self._actor
        try:
            async with asyncio.timeout(limit):
                return await getattr(actor, method).remote(*args)
        except TimeoutError as error:
            raise self.lose(f"it did not answer {method}() within {limit:g} s", actor) from error
        except EngineDeadError as error:  # Ray's copy of it has the worker's traceback in its message
            raise self.lose(str(getattr(error, "cause", error)), actor, Kind.ENGINE) from error
        except RayTaskError:
            raise
        except RayError as error:
            raise self.lose(first_line(error), actor) from error

    def lose(self, reason: str, actor: Any = None, kind: Kind = Kind.WORKER_LOST) -> WorkerLost:
        """Give the worker up and kill what is left of it; ``actor``: only if it is still this one. Returns the loss."""
        if self.loss is None and actor in (None, self._actor):
            self.loss = WorkerLost(f"Rollout worker {self.index} is lost: {reason.rstrip('.')}.", kind)
            self.admitted = False
            end(self._actor)
        return self.loss or WorkerLost(f"Rollout worker {self.index} was replaced during a call.")

    async def start(self, log: str) -> None:
        """Start the engine for the first time.

        Raises:
            StartFailed: it cannot start, or did not within ``cluster.startup_timeout_s``.
            WorkerLost: its process or node was lost.
        """
        limit, who = self._config.cluster.startup_timeout_s, f"Rollout worker {self.index}"
        try:
            async with asyncio.timeout(limit):
                await started(who, log, self._actor.start.remote())
        except TimeoutError:
            reason = f"{who} did not start within cluster.startup_timeout_s={limit:g}. Its log is {log}."
            raise StartFailed(reason) from None

    async def restart(self) -> None:
        """Put a new actor in place of a lost one, and start its engine.

        Raises:
            WorkerLost: it did not start within ``cluster.startup_timeout_s``, or failed to.
        """
        self.restarts += 1
        self._actor, self.loss, self.starting = self._spawn(self.index), None, True
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


def end(actor: Any) -> None:
    """Kill an actor that may be dead already."""
    if isinstance(actor, ray.actor.ActorHandle):
        with contextlib.suppress(RayError):
            ray.kill(actor, no_restart=True)
