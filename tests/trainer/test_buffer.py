"""The staleness bound of the buffer, under random orders of finishing, failing and training."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.buffer import Buffer, State


@settings(max_examples=200, deadline=None)
@given(data=st.data(), per_step=st.integers(1, 4), max_staleness=st.integers(0, 4))
def test_no_prompt_is_trained_staler_than_the_bound_and_no_slot_leaks(data, per_step, max_staleness):
    async def scenario():
        buffer = Buffer(per_step, max_staleness)
        born, served, trained_at = {}, 0, {}
        training = None
        for _ in range(data.draw(st.integers(5, 60))):
            while buffer.free:
                number = buffer.put(served)
                born[number] = served
            assert buffer.occupied <= (max_staleness + 1) * per_step
            issued = [slot.number for slot in buffer.slots(State.ISSUED)]
            action = data.draw(st.sampled_from(["finish", "finish", "drop", "take", "release"]))
            if action in ("finish", "drop") and issued:
                number = data.draw(st.sampled_from(issued))
                buffer.finish(number, "t") if action == "finish" else buffer.drop(number)
            elif action == "take" and training is None:
                try:
                    training = await asyncio.wait_for(buffer.take(), 0.001)
                except TimeoutError:
                    continue
                assert len(training) == per_step
                for slot in training:
                    trained_at[slot.number] = served
                    assert served - born[slot.number] <= max_staleness
            elif action == "release" and training is not None:
                served += 1
                buffer.release()
                training = None
        assert sorted(trained_at) == list(trained_at), "training follows the order of admission"
        assert buffer.occupied <= buffer.capacity

    asyncio.run(scenario())


def test_take_waits_for_the_oldest_even_when_younger_ones_are_there():
    async def scenario():
        buffer = Buffer(prompts_per_step=2, max_staleness=1)
        numbers = [buffer.put(name) for name in "abcd"]
        for number in numbers[1:]:
            buffer.finish(number, "done")
        taking = asyncio.ensure_future(buffer.take())
        await asyncio.sleep(0.01)
        assert not taking.done()
        buffer.finish(numbers[0], "done")
        assert [slot.prompt for slot in await taking] == ["a", "b"]

    asyncio.run(scenario())


def test_a_dropped_slot_is_free_at_once_and_counted():
    async def scenario():
        buffer = Buffer(prompts_per_step=128, max_staleness=0)
        numbers = [buffer.put(i) for i in range(128)]
        with pytest.raises(RuntimeError, match="no free slot"):
            buffer.put("one more")
        for number in numbers[:3]:
            buffer.drop(number)
        assert (buffer.free, buffer.dropped) == (3, 3)
        for number in numbers[3:]:
            buffer.finish(number, "done")
        taking = asyncio.ensure_future(buffer.take())
        await asyncio.sleep(0.01)
        assert not taking.done(), "125 of 128 must not train"
        for _ in range(3):
            buffer.finish(buffer.put("again"), "done")
        assert len(await taking) == 128

    asyncio.run(scenario())


def test_admission_waits_until_the_trained_weights_are_pulled():
    async def scenario():
        buffer = Buffer(prompts_per_step=1, max_staleness=0)
        buffer.finish(await buffer.admit("a"), "done")
        await buffer.take()
        admission = asyncio.ensure_future(buffer.admit("b"))
        await asyncio.sleep(0.01)
        assert not admission.done()
        buffer.release()
        assert await admission == 1

    asyncio.run(scenario())
