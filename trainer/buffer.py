"""The buffer between rollouts and learner: a strict FIFO of slots that bounds how stale a training batch can be.

A slot holds one prompt (all its rollouts) from the moment the prompt is admitted until the policy that its training
produced has been pulled by the rollout workers:

    ISSUED --finish--> FINISHED --take--> TRAINING --release--> free
       \\--drop--> free (counted)

Bound. Let P be the prompts of a step, s = ``max_staleness`` and (s + 1) P the capacity. A prompt admitted while the workers
serve version v starts under v or later. At its admission at most (s + 1) P - 1 other slots are taken, all ahead of it. If a
batch is in training then (its P slots count), at most s P - 1 waiting slots are ahead, so that prompt is in one of the s
batches after the one in training; that one produces v + 1, so it is trained on by the learner at version v + s or
before. If none is in training, it is in one of the next s + 1 batches, the last of which is trained at v + s. A drop
only moves it forward. Hence staleness <= s. Slots are freed by `release`, after the pull, so nothing is admitted under a
version that is already superseded.

Example:
    >>> import asyncio
    >>> async def main():
    ...     buffer = Buffer(prompts_per_step=1, max_staleness=0)
    ...     slot = await buffer.admit("prompt")
    ...     buffer.finish(slot, "trajectories")
    ...     taken = await buffer.take()
    ...     buffer.release()
    ...     return taken[0].result, buffer.occupied
    >>> asyncio.run(main())
    ('trajectories', 0)

What is not here: what a prompt or a result is, and any Ray.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

P = TypeVar("P")
R = TypeVar("R")


class State(Enum):
    """Where a slot is on its way."""

    ISSUED = "issued"
    FINISHED = "finished"
    TRAINING = "training"


@dataclass
class Slot(Generic[P, R]):
    """One admitted prompt."""

    number: int
    """Running number; the order of training."""
    prompt: P
    """What was admitted."""
    state: State = State.ISSUED
    """Where it is."""
    result: R | None = None
    """Its trajectories, once finished."""


class Buffer(Generic[P, R]):
    """See the module's docstring. All methods run on one asyncio loop."""

    def __init__(self, prompts_per_step: int, max_staleness: int) -> None:
        self.prompts_per_step = prompts_per_step
        self.capacity = (max_staleness + 1) * prompts_per_step
        self.dropped = 0
        self._slots: OrderedDict[int, Slot[P, R]] = OrderedDict()
        self._next = 0
        self._changed = asyncio.Event()

    @property
    def occupied(self) -> int:
        """Slots that are not free."""
        return len(self._slots)

    @property
    def free(self) -> int:
        """Prompts that can be admitted now."""
        return self.capacity - len(self._slots)

    def slots(self, *states: State) -> list[Slot[P, R]]:
        """The slots in any of ``states``, oldest first."""
        return [slot for slot in self._slots.values() if slot.state in states]

    def __contains__(self, number: int) -> bool:
        return number in self._slots

    async def wait_free(self, count: int = 1) -> None:
        """Wait until ``count`` slots are free."""
        await self._wait_for(lambda: self.free >= count)

    def put(self, prompt: P) -> int:
        """Take a free slot for ``prompt``; returns its number. Raises RuntimeError when none is free."""
        if self.free < 1:
            raise RuntimeError("The buffer has no free slot.")
        number, self._next = self._next, self._next + 1
        self._slots[number] = Slot(number, prompt)
        return number

    async def admit(self, prompt: P) -> int:
        """Wait for a free slot and take it for ``prompt``."""
        await self.wait_free()
        return self.put(prompt)

    def finish(self, number: int, result: R) -> None:
        """The rollouts of a slot are there."""
        slot = self._slots[number]
        slot.state, slot.result = State.FINISHED, result
        self._changed.set()

    def drop(self, number: int) -> None:
        """Give a slot up: its rollouts failed or were filtered. It is free at once, and counted."""
        del self._slots[number]
        self.dropped += 1
        self._changed.set()

    async def take(self) -> list[Slot[P, R]]:
        """Wait until the oldest P slots are finished and take them for training."""
        await self._wait_for(self._batch_ready)
        batch = self.slots(State.ISSUED, State.FINISHED)[: self.prompts_per_step]
        for slot in batch:
            slot.state = State.TRAINING
        return batch

    def release(self) -> None:
        """Free the slots in training: the workers now serve the policy that their training produced."""
        for slot in self.slots(State.TRAINING):
            del self._slots[slot.number]
        self._changed.set()

    def _batch_ready(self) -> bool:
        waiting = self.slots(State.ISSUED, State.FINISHED)[: self.prompts_per_step]
        return len(waiting) == self.prompts_per_step and all(slot.state is State.FINISHED for slot in waiting)

    async def _wait_for(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()
