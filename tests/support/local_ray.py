"""Stands in for Ray within one process: what crosses between actors is pickled, and arrays arrive read-only, as from plasma.

    actor = Actor(RolloutWorker, config, path, 0)      # ray.remote(RolloutWorker).remote(config, path, 0)
    await actor.submit.remote(prompts, slots)          # runs on this loop, or (threaded) in a thread of the actor's own
    batch = put(batch)                                 # ray.put(batch)
    kill(actor)                                        # ray.kill(actor): calls in flight and later ones raise ActorDiedError

A `Ref` among the arguments arrives as its value. What a method raises arrives as Ray's copy of it. A caller that is cancelled
leaves the call running. Processes, nodes, resources and limits of concurrency are Ray's alone, and tested there.
"""

from __future__ import annotations

import asyncio
import pickle
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cloudpickle
from ray.exceptions import ActorDiedError, RayTaskError


class Parcel:
    """A value as it lies in the object store: every `open` gives another copy, whose arrays cannot be written to."""

    def __init__(self, value: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        self._bytes = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        self._buffers = [bytes(buffer.raw()) for buffer in buffers]

    def open(self) -> Any:
        return pickle.loads(self._bytes, buffers=self._buffers)


def sent(value: Any) -> Any:
    """What arrives of a value in another process."""
    return Parcel(value).open()


class Ref:
    """A result, there or to come; to await it is to get a copy of it."""

    def __init__(self, parcel: asyncio.Future[Parcel]) -> None:
        self._parcel = parcel
        parcel.add_done_callback(lambda done: done.cancelled() or done.exception())  # Ray tells nobody who does not ask

    def __await__(self):
        return self._get().__await__()

    async def _get(self) -> Any:
        parcel = self._parcel.result() if self._parcel.done() else await asyncio.shield(self._parcel)
        return parcel.open()


def put(value: Any) -> Ref:
    parcel = asyncio.get_running_loop().create_future()
    parcel.set_result(Parcel(value))
    return Ref(parcel)


def kill(actor: Actor) -> None:
    actor._dead.set()


class Actor:
    """A handle; ``instance`` is the object behind it, which no real handle gives away.

    Args:
        kind: class of the actor.
        arguments: what it is made from.
        threaded: methods that are no coroutines run in a thread, one after the other, and the loop does not wait for them.
    """

    def __init__(self, kind: type, *arguments: Any, threaded: bool = False) -> None:
        self.instance = kind(*map(sent, arguments))
        self._dead = asyncio.Event()
        self._thread = ThreadPoolExecutor(1) if threaded else None

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)

    async def _run(self, name: str, arguments: list[Ref | Parcel]) -> Any:
        """The value that the method returned; what it raised, as Ray tells it."""
        values = [await each if isinstance(each, Ref) else each.open() for each in arguments]
        dead = asyncio.ensure_future(self._dead.wait())
        work = asyncio.ensure_future(self._work(getattr(self.instance, name), values))
        try:
            if not self._dead.is_set():
                await asyncio.wait({work, dead}, return_when=asyncio.FIRST_COMPLETED)
            if self._dead.is_set():
                raise ActorDiedError()
            return work.result()
        except ActorDiedError:
            raise
        except Exception as error:
            task_error = RayTaskError(name, traceback.format_exc(), error, "local", 0, "127.0.0.1")
            raise sent(task_error).as_instanceof_cause() from None
        finally:
            dead.cancel()
            work.cancel()

    async def _work(self, function: Any, values: list[Any]) -> Any:
        if self._thread and not asyncio.iscoroutinefunction(function):
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *values)
        result = function(*values)
        return await result if asyncio.iscoroutine(result) else result


class Method:
    """``actor.method``"""

    def __init__(self, actor: Actor, name: str, returns: int | None = None) -> None:
        self._actor, self._name, self._returns = actor, name, returns

    def options(self, num_returns: int | None = None, concurrency_group: str | None = None) -> Method:
        return Method(self._actor, self._name, num_returns)

    def remote(self, *arguments: Any) -> Any:
        """A `Ref`, or as many as ``num_returns`` says."""
        parcels = [each if isinstance(each, Ref) else Parcel(each) for each in arguments]
        whole = asyncio.ensure_future(self._actor._run(self._name, parcels))
        if self._returns is None:
            return Ref(asyncio.ensure_future(_packed(whole)))
        return [Ref(asyncio.ensure_future(_packed(whole, i))) for i in range(self._returns)]


async def _packed(whole: asyncio.Future[Any], part: int | None = None) -> Parcel:
    value = await whole
    return Parcel(value if part is None else value[part])
