"""Admission on a simulated clock with the buffer that runs use: what it costs, what it gains, and that it never stops a run."""

import asyncio
import heapq
from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kill_points import numbers
from tests.support.local_run import run
from trainer.run.admission import Admission
from trainer.run.buffer import Buffer

TURNS = 5
"""Turns of the event loop after which a task that can continue has done so."""


@dataclass
class History:
    """What a simulated run did; one entry a step, a prompt, or a trained prompt."""

    step_seconds: list = field(default_factory=list)
    limits: list = field(default_factory=list)
    trained: list = field(default_factory=list)
    staleness: list = field(default_factory=list)
    dropped: list = field(default_factory=list)


async def simulate(shape, rollout_s, train_s, steps, full=False, at_once=inf, drops=lambda prompt: False):
    """Rollouts of ``rollout_s(prompt)`` seconds, at most ``at_once`` together, and steps of ``train_s(step)`` seconds.

    As in the controller, one task admits whenever the buffer lets it and another one takes.
    """
    buffer = Buffer(*shape)
    admission = Admission(shape[0], buffer.capacity, full)
    buffer.limit = admission.limit
    now, version, admitted, queue, running, began, history = 0.0, 0, 0, [], [], {}, History()

    def start():
        while queue and len(running) < at_once:
            number, prompt = queue.pop(0)
            began[prompt] = version
            heapq.heappush(running, (now + rollout_s(prompt), number, prompt))

    async def issue():
        nonlocal admitted
        while True:
            await buffer.wait_free()
            while buffer.free > 0:
                queue.append((buffer.put(admitted), admitted))
                admitted += 1
            assert buffer.occupied <= buffer.limit <= buffer.capacity
            start()

    async def settle():
        for _ in range(TURNS):
            await asyncio.sleep(0)

    async def end_next():
        nonlocal now
        assert running, "nothing runs, nothing is trained on: the run is stuck"
        now, number, prompt = heapq.heappop(running)
        if drops(prompt):
            history.dropped.append(prompt)
            buffer.drop(number)
        else:
            buffer.finish(number, prompt)
        start()
        await settle()

    issuing = asyncio.create_task(issue())
    await settle()
    for step in range(steps):
        asked, ready = now, buffer.ready
        taking = asyncio.create_task(buffer.take())
        await settle()
        while not taking.done():
            await end_next()
        buffer.limit = admission.took(asked, now, ready)
        await settle()
        batch = [slot.prompt for slot in taking.result()]
        history.trained += batch
        history.staleness.append([version - began[prompt] for prompt in batch])
        history.limits.append(buffer.limit)
        trained_at = now + train_s(step)
        while running and running[0][0] <= trained_at:
            await end_next()
        now, version = trained_at, version + 1
        history.step_seconds.append(now - asked)
        buffer.release()
        await settle()
    issuing.cancel()
    return history


def simulated(*args, **kwargs):
    return asyncio.run(simulate(*args, **kwargs))


def mean_staleness(history, first):
    late = [one for batch in history.staleness[first:] for one in batch]
    return sum(late) / len(late)


def test_rollouts_shorter_than_a_step_are_one_version_late_and_cost_nothing():
    history, full = (simulated((8, 4), lambda _: 7.0, lambda _: 10.0, 40, full) for full in (False, True))
    assert history.step_seconds[1:] == full.step_seconds[1:] == [10.0] * 39
    assert mean_staleness(history, 2) == 1.0 and mean_staleness(full, 5) == 4.0


def test_longer_rollouts_get_the_slots_that_they_need_and_no_more():
    """Rollouts of 2.5 steps must begin 3 steps ahead: 4 batches in use, where the bound of 8 allows 9."""
    history = simulated((8, 8), lambda _: 25.0, lambda _: 10.0, 300)
    assert sum(history.step_seconds[100:]) <= 1.02 * 200 * 10.0
    assert 2.9 <= mean_staleness(history, 100) <= 3.2


def test_where_rollouts_are_the_bottleneck_the_buffer_fills_and_nothing_is_slower():
    """12 at once, 30 s each: a batch of 8 takes 20 s, twice a step of training."""
    fresh, full = (simulated((8, 4), lambda p: 20.0 + 20.0 * (p % 2), lambda _: 10.0, 100, full, 12) for full in (False, True))
    assert fresh.limits[20:] == [40] * 80
    assert sum(fresh.step_seconds[20:]) <= 1.001 * sum(full.step_seconds[20:])


def test_training_that_becomes_slow_makes_rollouts_fresh_again():
    history = simulated((8, 4), lambda _: 30.0, lambda step: 10.0 if step < 30 else 100.0, 150)
    assert max(history.limits[:30]) > 24 and history.limits[-1] == 16
    assert mean_staleness(history, 140) == 1.0


SHAPES = st.tuples(st.integers(1, 5), st.integers(0, 4)).flatmap(
    lambda shape: st.tuples(st.just(shape[0]), st.just(shape[1]), st.integers(0, shape[0] * shape[1]))
)
SECONDS = st.one_of(st.just(0.0), st.floats(0.0, 100.0))


@settings(max_examples=150, deadline=None)
@given(
    shape=SHAPES,
    rollouts=st.lists(SECONDS, min_size=1, max_size=20),
    steps=st.lists(SECONDS, min_size=1, max_size=8),
    at_once=st.sampled_from([1, 3, inf]),
    every=st.integers(2, 9),
)
def test_whatever_takes_how_long_every_prompt_is_trained_on_within_the_bound(shape, rollouts, steps, at_once, every):
    per_step, max_staleness, window = shape

    def drops(prompt):
        return prompt % every == 1

    history = simulated(
        shape, lambda p: rollouts[p % len(rollouts)], lambda k: steps[k % len(steps)], 25, at_once=at_once, drops=drops
    )
    assert len(set(history.trained)) == len(history.trained) == 25 * per_step
    assert max(max(batch) for batch in history.staleness) <= max_staleness
    last = max(history.trained)
    left_behind = set(range(last - window)) - set(history.trained) - set(history.dropped)
    assert not left_behind, "whatever is further than the window behind what was trained on was trained on, too"
    if not window:
        assert history.trained == sorted(history.trained)


@given(st.integers(1, 100), st.integers(0, 8), st.lists(st.tuples(SECONDS, SECONDS, st.integers(0, 900)), max_size=60))
def test_the_limit_leaves_room_for_two_batches_and_never_passes_the_capacity(per_step, max_staleness, batches):
    capacity = (max_staleness + 1) * per_step
    admission, now = Admission(per_step, capacity), 0.0
    least = min(2, max_staleness + 1) * per_step
    for worked, waited, ready in batches:
        asked, now = now + worked, now + worked + waited
        limit = admission.took(asked, now, ready)
        assert least <= limit == admission.limit <= capacity
        assert max_staleness > 1 or limit == capacity, "there is nothing to decide"


def test_a_raised_limit_wakes_who_waits_for_a_slot_and_restored_slots_may_be_above_it():
    async def scenario():
        buffer = Buffer(prompts_per_step=1, max_staleness=4)
        buffer.limit = 2
        assert buffer.refill([(prompt, None) for prompt in "abc"], lambda _: 0) == [] and buffer.free == -1
        waiting = asyncio.create_task(buffer.wait_free())
        await asyncio.sleep(0)
        buffer.limit = 9
        await waiting
        return buffer.free, buffer.limit

    assert asyncio.run(scenario()) == (2, 5)


@pytest.mark.slow
def test_a_synchronous_run_is_the_same_to_the_bit_however_prompts_are_admitted(tmp_path):
    fresh, full = (numbers(run(tmp_path / name, "max_staleness=0", f"admission={name}")) for name in ("fresh", "full"))
    assert fresh == full


@pytest.mark.slow
def test_a_run_keeps_its_limit_and_a_resumed_one_measures_again(tmp_path):
    options = ["max_staleness=4", "checkpoint.every=1"]
    run(tmp_path, *options, "steps=4")
    rows = run(tmp_path, *options, "steps=8", resume=True)
    assert [row["step"] for row in rows] == list(range(9))
    assert all(16 <= row["off_policy/in_flight_limit"] <= 40 and row["off_policy/max"] <= 4 for row in rows[1:])
    assert all(row["off_policy/in_flight"] <= 40 for row in rows[1:])
