"""The buffer between rollouts and learner: a windowed FIFO of slots that bounds how stale a training batch can be.

A slot holds one prompt (all its rollouts) from the moment the prompt is admitted until the policy that its training
produced has been pulled by the rollout workers:

    ISSUED --finish--> FINISHED --take--> TRAINING --release--> free
       \\--drop--> free (counted)

Window. `take` gives the oldest finished slots whose number is at most w = ``window`` above that of the oldest unfinished one:
a slow rollout holds up what was admitted more than w prompts after it, and nothing else. w = 0 is strict order of admission.

Bound. Let P be the prompts of a step, s = ``max_staleness`` and B = (s + 1) P - w the capacity. A prompt x that is admitted
while the workers serve version v starts under v or later. What trains before x was waiting when x was admitted, or overtakes
it. A slot n > x overtakes only while x is unfinished; then the oldest unfinished number is at most x, so n <= x + w: w slots
at most, ever, since numbers only grow and a finished slot is never overtaken.
If no batch is in training when x is admitted, at most B - 1 + w slots train before x, so x is in batch number
(B - 1 + w) // P + 1 of those to come or before. The first of them trains at v and each makes one version, so x trains at
v + (B - 1 + w) // P = v + s or before. If a batch is in training, its P slots are not waiting and it trains at v: x is in
batch (B - 1 - P + w) // P + 1 = s of those after it or before, which trains at v + s. A drop only moves x forward. A prompt
that is issued again, because its worker was lost or the run resumed, starts later: under v or a newer version, with no more
slots before it. Hence staleness <= s. Slots are freed by `release`, after the pull, so nothing is admitted under a version
that is already superseded.

Pieces. What is left of an episode that was cut is admitted like a prompt (`workers.rollout.group.Continuation`): nothing of it
is sampled while it waits for a slot, the tokens that it trains on are sampled under the version served at its admission or a
later one, and the tokens before them are context there, which the bound is not about. It holds no slot while it waits, and the
slots that are held finish without it, so nobody waits forever.

Fewer slots. ``limit`` may keep admission below B (`trainer.run.admission` decides how far): a prompt that is admitted later has
fewer slots before it and starts under the same version or a newer one, so the bound holds.

Other settings. A resumed run may have another P, s or w, and what the checkpoint holds was admitted under the old ones. Nothing
overtakes a finished slot, so the one in place n (from 0) trains in batch n // P + 1 from now or before: n // P versions after
this one at the latest. `refill` keeps the results for which that is soon enough, and as many slots as B allows; all others are
issued now or later, and what holds for a new prompt holds for them.

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

Cost. Each slot enters and leaves two heaps once, so a step of P prompts costs O(P log P); only `slots`, which a checkpoint asks
for, looks at all of them.

What is not here: what a prompt or a result is, and any Ray.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable
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

    def __init__(self, prompts_per_step: int, max_staleness: int, window: int = 0) -> None:
        if not 0 <= window <= max_staleness * prompts_per_step:
            raise ValueError(f"A window of {window} prompts leaves no room for a batch of {prompts_per_step}.")
        self.prompts_per_step, self.max_staleness, self.window = prompts_per_step, max_staleness, window
        self.capacity = (max_staleness + 1) * prompts_per_step - window
        self._limit = self.capacity
        self.dropped = 0
        self._slots: OrderedDict[int, Slot[P, R]] = OrderedDict()
        self._issued: OrderedDict[int, None] = OrderedDict()
        """Numbers of the ISSUED slots, oldest first."""
        self._ready: list[int] = []
        """Heap of the FINISHED slots that the window lets train."""
        self._beyond: list[int] = []
        """Heap of the FINISHED slots that it does not let train yet."""
        self._training: list[int] = []
        self._next = 0
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def occupied(self) -> int:
        """Slots that are not free."""
        return len(self._slots)

    @property
    def free(self) -> int:
        """Prompts that may be admitted now; below 0 where more slots are in use than ``limit``."""
        return self._limit - len(self._slots)

    @property
    def limit(self) -> int:
        """Slots that may be in use before admission waits, at most ``capacity``."""
        return self._limit

    @limit.setter
    def limit(self, slots: int) -> None:
        self._limit = min(slots, self.capacity)
        self._changed.set()

    @property
    def ready(self) -> int:
        """Finished slots that can be taken now."""
        return len(self._ready)

    def slots(self, *states: State) -> list[Slot[P, R]]:
        """The slots in any of ``states``, oldest first."""
        return [slot for slot in self._slots.values() if slot.state in states]

    def __contains__(self, number: int) -> bool:
        return number in self._slots

    async def wait_free(self, count: int = 1) -> None:
        """Wait until ``count`` slots are free."""
        await self._wait_for(lambda: self.free >= count)

    def put(self, prompt: P) -> int:
        """Take a slot for ``prompt``, whatever ``limit`` is; returns its number. Raises RuntimeError when all are in use."""
        if self.occupied >= self.capacity:
            raise RuntimeError("The buffer has no free slot.")
        number, self._next = self._next, self._next + 1
        self._slots[number] = Slot(number, prompt)
        self._issued[number] = None
        return number

    def refill(self, held: Iterable[tuple[P, R | None]], staleness: Callable[[R], int]) -> list[P]:
        """Fill an empty buffer with what an earlier one held, which may have had another shape.

        Args:
            held: prompt and result (None: it has none yet) of each slot, oldest first.
            staleness: of a result, if it were trained on now.

        Returns:
            The prompts for which there is no room, to be admitted before any new one. Slots whose result would be too stale by
            the time it is trained on are ISSUED again; without a change of shape there are neither.
        """
        rest: list[P] = []
        for prompt, result in held:
            if self.occupied >= self.capacity:
                rest.append(prompt)
                continue
            place = self.put(prompt)
            if result is not None and staleness(result) + place // self.prompts_per_step <= self.max_staleness:
                self.finish(place, result)
        return rest

    async def admit(self, prompt: P) -> int:
        """Wait for a free slot and take it for ``prompt``."""
        await self.wait_free()
        return self.put(prompt)

    def finish(self, number: int, result: R) -> None:
        """The rollouts of a slot are there. Raises RuntimeError when they are already, so that nothing is trained twice."""
        slot = self._slots[number]
        if slot.state is not State.ISSUED:
            raise RuntimeError(f"The rollouts of slot {number} came twice.")
        slot.state, slot.result = State.FINISHED, result
        heapq.heappush(self._beyond, number)
        self._leave_issued(number)

    def drop(self, number: int) -> None:
        """Give a slot up: its rollouts failed or were filtered. It is free at once, and counted."""
        if self._slots[number].state is not State.ISSUED:
            raise RuntimeError(f"Slot {number} has its rollouts, so it cannot be dropped.")
        del self._slots[number]
        self.dropped += 1
        self._leave_issued(number)

    async def take(self) -> list[Slot[P, R]]:
        """Wait until P slots can be trained on and take them, in order of admission; none of them once `close` was called."""
        await self._wait_for(lambda: self._closed or len(self._ready) >= self.prompts_per_step)
        if self._closed:
            return []
        numbers = [heapq.heappop(self._ready) for _ in range(self.prompts_per_step)]
        self._training += numbers
        batch = [self._slots[number] for number in numbers]
        for slot in batch:
            slot.state = State.TRAINING
        return batch

    def close(self) -> None:
        """Give no more batches: whoever waits in `take` gets none. What is in the buffer stays."""
        self._closed = True
        self._changed.set()

    def release(self) -> None:
        """Free the slots in training: the workers now serve the policy that their training produced."""
        for number in self._training:
            del self._slots[number]
        self._training = []
        self._changed.set()

    def _leave_issued(self, number: int) -> None:
        """A slot is no longer unfinished. The oldest unfinished number only grows, so each slot enters `_ready` once."""
        del self._issued[number]
        oldest = next(iter(self._issued), self._next)
        while self._beyond and self._beyond[0] <= oldest + self.window:
            heapq.heappush(self._ready, heapq.heappop(self._beyond))
        self._changed.set()

    async def _wait_for(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()
