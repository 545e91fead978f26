"""The staleness bound of the buffer, under random orders of finishing, failing, losing workers, resuming and training."""

import asyncio
import heapq
import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.run import buffer as buffer_module
from trainer.run.buffer import Buffer, State

OTHERS = 5
"""Turns of the event loop after which a task that can continue has continued."""


async def settled(task):
    """Whether ``task`` is done once everything that can happen has happened."""
    for _ in range(OTHERS):
        await asyncio.sleep(0)
    return task.done()


async def taken(buffer):
    """The batch that can be taken now, or None."""
    taking = asyncio.ensure_future(buffer.take())
    if await settled(taking):
        return taking.result()
    taking.cancel()
    return None


class Run:
    """A learner and rollout workers that do what `hypothesis` says, and what must hold whatever that is."""

    def __init__(self, *shape):
        self.reshape(shape)
        self.version, self.admitted, self.trained, self.dropped, self.returned = 0, 0, [], [], []
        self.sampled_under = {}
        self.training = None

    def reshape(self, shape):
        self.shape, self.buffer = shape, Buffer(*shape)
        self.per_step, self.max_staleness, self.window = shape

    def admit(self):
        while self.buffer.free:
            if self.returned:
                prompt = self.returned.pop(0)
            else:
                prompt, self.admitted = self.admitted, self.admitted + 1
            self.buffer.put(prompt)
            self.sampled_under[prompt] = self.version
        assert self.buffer.occupied == self.buffer.capacity == (self.max_staleness + 1) * self.per_step - self.window

    def issued(self):
        return [slot.number for slot in self.buffer.slots(State.ISSUED)]

    def prompt(self, number):
        return next(slot.prompt for slot in self.buffer.slots(*State) if slot.number == number)

    def finish(self, number):
        self.buffer.finish(number, self.prompt(number))

    def drop(self, number):
        self.dropped.append(self.prompt(number))
        self.buffer.drop(number)

    def lose(self, number):
        """Its worker is lost: the prompt starts again under what is served now."""
        self.sampled_under[self.prompt(number)] = self.version

    async def take(self):
        if self.training is None and (batch := await taken(self.buffer)):
            self.training = [slot.prompt for slot in batch]
            assert len(batch) == self.per_step and sorted(self.training) == self.training
            for prompt in self.training:
                assert self.version - self.sampled_under[prompt] <= self.max_staleness

    def release(self):
        if self.training is not None:
            self.version += 1
            self.trained += self.training
            self.training = None
            self.buffer.release()

    def resume(self, shape):
        """A checkpoint between two steps: finished ones are kept as far as ``shape`` allows, the rest starts again."""
        if self.training is not None:
            return
        old, same = self.buffer, shape == self.shape
        self.reshape(shape)
        held = [(slot.prompt, slot.result) for slot in old.slots(State.ISSUED, State.FINISHED)]
        self.returned = self.buffer.refill(held, lambda prompt: self.version - self.sampled_under[prompt]) + self.returned
        for number in self.issued():
            self.lose(number)
        if same:
            results = [slot.result for slot in self.buffer.slots(State.ISSUED, State.FINISHED)]
            assert results == [result for _, result in held], "nothing is sampled twice without need"


SHAPES = st.tuples(st.integers(1, 4), st.integers(0, 4)).flatmap(
    lambda shape: st.tuples(st.just(shape[0]), st.just(shape[1]), st.integers(0, shape[0] * shape[1]))
)
ACTIONS = ["finish", "finish", "finish", "drop", "lose", "take", "release", "resume", "reshape"]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), shape=SHAPES)
def test_nothing_is_staler_than_the_bound_or_trained_twice_and_no_slot_leaks(data, shape):
    async def scenario():
        run = Run(*shape)
        strict = run.window == 0
        for _ in range(data.draw(st.integers(5, 60))):
            run.admit()
            action = data.draw(st.sampled_from(ACTIONS))
            if action in ("finish", "drop", "lose"):
                if issued := run.issued():
                    getattr(run, action)(data.draw(st.sampled_from(issued)))
            elif action == "take":
                await run.take()
            elif action == "release":
                run.release()
            else:
                run.resume(run.shape if action == "resume" else data.draw(SHAPES))
                strict = strict and run.window == 0
        for _ in range(3):  # whatever happened, it continues when everything finishes
            run.release()
            run.admit()
            for number in run.issued():
                run.finish(number)
            before = run.version
            await run.take()
            run.release()
            assert run.version == before + 1
        gone = run.trained + run.dropped
        left = [slot.prompt for slot in run.buffer.slots(*State)] + run.returned
        assert sorted(gone + left) == list(range(run.admitted)), "every prompt is trained once, dropped, or still there"
        if strict:
            assert run.trained == sorted(run.trained), "without a window training follows the order of admission"

    asyncio.run(scenario())


@pytest.mark.parametrize(("per_step", "max_staleness", "window"), [(1, 2, 1), (2, 2, 0), (2, 2, 3), (4, 2, 4), (3, 4, 7)])
def test_the_bound_is_reached_so_no_larger_capacity_would_keep_it(per_step, max_staleness, window):
    """The worst case: every prompt finishes at once, but one, which finishes when nothing can overtake it any more."""

    async def scenario():
        run = Run(per_step, max_staleness, window)
        run.admit()
        slow = run.issued()[-1]
        while slow not in run.trained:
            for number in run.issued():
                if number != slow:
                    run.finish(number)
            await run.take()
            if run.training is None:
                run.finish(slow)
                await run.take()
            if slow in run.training:
                assert run.version == max_staleness
            run.release()
            run.admit()

    asyncio.run(scenario())


def test_take_waits_for_the_oldest_even_when_younger_ones_are_there():
    async def scenario():
        buffer = Buffer(prompts_per_step=2, max_staleness=1)
        numbers = [buffer.put(name) for name in "abcd"]
        for number in numbers[1:]:
            buffer.finish(number, "done")
        taking = asyncio.ensure_future(buffer.take())
        assert not await settled(taking)
        buffer.finish(numbers[0], "done")
        assert [slot.prompt for slot in await taking] == ["a", "b"]

    asyncio.run(scenario())


def test_a_window_lets_a_batch_pass_a_slow_rollout_but_not_further_than_it_is_wide():
    async def scenario():
        buffer = Buffer(prompts_per_step=2, max_staleness=2, window=2)
        numbers = [buffer.put(name) for name in "abcd"]
        for number in numbers[1:]:
            buffer.finish(number, "done")
        assert [slot.prompt for slot in await buffer.take()] == ["b", "c"]
        buffer.release()
        buffer.finish(buffer.put("e"), "done")
        taking = asyncio.ensure_future(buffer.take())
        assert not await settled(taking), "d is more than two prompts after a"
        buffer.finish(numbers[0], "done")
        assert [slot.prompt for slot in await taking] == ["a", "d"]

    asyncio.run(scenario())


def test_a_window_that_leaves_no_room_for_a_batch_is_refused():
    with pytest.raises(ValueError, match="no room"):
        Buffer(prompts_per_step=4, max_staleness=1, window=5)


@pytest.mark.parametrize("failed", [1, 3, 128])
def test_a_dropped_slot_is_free_at_once_and_counted(failed):
    async def scenario():
        buffer = Buffer(prompts_per_step=128, max_staleness=0)
        numbers = [buffer.put(i) for i in range(128)]
        with pytest.raises(RuntimeError, match="no free slot"):
            buffer.put("one more")
        for number in numbers[:failed]:
            buffer.drop(number)
        assert (buffer.free, buffer.dropped) == (failed, failed)
        for number in numbers[failed:]:
            buffer.finish(number, "done")
        taking = asyncio.ensure_future(buffer.take())
        assert not await settled(taking), f"{128 - failed} of 128 must not train"
        for _ in range(failed):
            buffer.finish(buffer.put("again"), "done")
        assert len(await taking) == 128

    asyncio.run(scenario())


def test_rollouts_that_come_twice_are_refused():
    buffer = Buffer(prompts_per_step=1, max_staleness=0)
    number = buffer.put("a")
    buffer.finish(number, "done")
    with pytest.raises(RuntimeError, match="came twice"):
        buffer.finish(number, "done")


def test_admission_waits_until_the_trained_weights_are_pulled():
    async def scenario():
        buffer = Buffer(prompts_per_step=1, max_staleness=0)
        buffer.finish(await buffer.admit("a"), "done")
        await buffer.take()
        admission = asyncio.ensure_future(buffer.admit("b"))
        assert not await settled(admission)
        buffer.release()
        assert await admission == 1

    asyncio.run(scenario())


def test_a_closed_buffer_lets_go_of_who_waits_and_keeps_what_it_has():
    async def scenario():
        buffer = Buffer(prompts_per_step=2, max_staleness=0)
        buffer.finish(buffer.put("a"), "done")
        taking = asyncio.ensure_future(buffer.take())
        assert not await settled(taking)
        buffer.close()
        assert await taking == [] and [slot.prompt for slot in buffer.slots(*State)] == ["a"]

    asyncio.run(scenario())


class Counted:
    """heapq, counting what goes in and out."""

    def __init__(self):
        self.moves = 0

    def heappush(self, heap, number):
        self.moves += 1
        heapq.heappush(heap, number)

    def heappop(self, heap):
        self.moves += 1
        return heapq.heappop(heap)


def watched(kind, examined):
    """``kind``, a container, that adds to ``examined`` whatever an iteration over it looks at."""

    class Watched(kind):
        def _watch(self, items):
            for item in items:
                examined.append(item)
                yield item

        def __iter__(self):
            return self._watch(super().__iter__())

        def values(self):
            return self._watch(super().values())

        def items(self):
            return self._watch(super().items())

    return Watched


@pytest.mark.parametrize("prompts", [64, 512])
@pytest.mark.parametrize("share", [0, 3])
def test_a_slot_costs_the_same_however_many_there_are(monkeypatch, prompts, share):
    """Into two heaps and out of them, once each, and looked at twice; though the learner waits all the time."""
    counted, examined = Counted(), []
    monkeypatch.setattr(buffer_module, "heapq", counted, raising=False)

    async def scenario():
        buffer = Buffer(prompts, max_staleness=4, window=share * prompts)
        for name, value in vars(buffer).items():
            if isinstance(value, dict | list):
                kind = OrderedDict if isinstance(value, OrderedDict) else type(value)
                setattr(buffer, name, watched(kind, examined)(value))
        order, waiting = random.Random(0), []
        for _ in range(3):
            taking = asyncio.create_task(buffer.take())
            while not taking.done():
                waiting += [buffer.put(None) for _ in range(buffer.free)]
                buffer.finish(waiting.pop(order.randrange(len(waiting))), None)
                await asyncio.sleep(0)
            assert len(taking.result()) == prompts
            buffer.release()
        return buffer._next

    admitted = asyncio.run(scenario())
    assert counted.moves <= 4 * admitted and len(examined) <= 2 * admitted


def test_batches_that_are_in_training_together_are_released_together():
    async def scenario():
        buffer = Buffer(prompts_per_step=1, max_staleness=2)
        for prompt in "abc":
            buffer.finish(buffer.put(prompt), "done")
        assert [(await buffer.take())[0].prompt for _ in range(2)] == ["a", "b"]
        buffer.release()
        assert [slot.prompt for slot in buffer.slots(*State)] == ["c"] and buffer.free == 2

    asyncio.run(scenario())


def test_a_slot_with_its_rollouts_cannot_be_dropped():
    buffer = Buffer(prompts_per_step=1, max_staleness=0)
    number = buffer.put("a")
    buffer.finish(number, "done")
    with pytest.raises(RuntimeError, match="cannot be dropped"):
        buffer.drop(number)
