"""The rollout worker on the real reference engine: many episodes, failures that stay alone, transport, reproducibility."""

import asyncio
import pickle
from dataclasses import replace

import numpy as np
import pytest

from rlframe.config import ConfigError
from rlframe.types import Batch
from tests.support.engines import alignment_error, checksum_of, perturbed, prompt_of, tiny_model, update_of
from tests.support.rollouts import config_of, model_folder, prompts_of
from workers.engines.protocol import SamplingParams
from workers.faults import Fault, Kind
from workers.rollout.worker import RolloutWorker

PARAMS = SamplingParams(max_new_tokens=6, logprobs=5)
FIELDS = ("tokens", "action_mask", "logprobs", "head_ids", "head_logprobs", "versions", "rewards", "offsets")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


def with_worker(path, use, **rollout):
    async def main():
        worker = RolloutWorker(config_of(**rollout), path)
        await worker.start()
        try:
            return await use(worker)
        finally:
            await worker.close()

    return asyncio.run(main())


async def collect_all(worker, n):
    """Batches by slot, and failures, of ``n`` prompts."""
    batches, failures = {}, {}
    while len(batches) + len(failures) < n:
        collected = await worker.collect(5.0)
        batches |= dict(collected.by_slot())
        failures |= dict(collected.failures)
    return batches, failures


def test_prompts_come_back_under_their_slots_with_all_their_rollouts(path):
    async def use(worker):
        await worker.submit(prompts_of(5), [50, 51, 52, 53, 54], 3, PARAMS)
        return await collect_all(worker, 5)

    batches, failures = with_worker(path, use)
    assert sorted(batches) == [50, 51, 52, 53, 54] and not failures
    for slot, batch in batches.items():
        assert len(batch) == 3 and set(batch.indices) == {slot - 50} and set(batch.prompt_ids) == {f"p{slot - 50}"}
        assert len({t.tokens.tobytes() for t in batch}) == 3, "rollouts of one prompt have seeds of their own"


def test_the_same_numbers_to_the_bit_whatever_runs_beside(path):
    def rollouts(order, max_concurrency, chunks):
        async def use(worker):
            prompts = prompts_of(6)
            for chunk in np.array_split(order, chunks):
                await worker.submit([prompts[i] for i in chunk], chunk.tolist(), 2, PARAMS)
                await asyncio.sleep(0.01)
            return (await collect_all(worker, 6))[0]

        return with_worker(path, use, max_concurrency=max_concurrency)

    alone = rollouts(np.arange(6), 1, 6)
    for crowd in (rollouts(np.arange(6)[::-1], 12, 1), rollouts(np.array([3, 0, 5, 1, 4, 2]), 3, 2)):
        for slot, batch in alone.items():
            for name in FIELDS:
                assert getattr(batch, name).tobytes() == getattr(crowd[slot], name).tobytes(), name


def test_failing_and_hanging_episodes_are_reported_and_leave_the_others_alone(path):
    prompts = prompts_of(4)
    prompts[1].payload["fault"] = "fail"
    prompts[2].payload["fault"] = "hang"

    async def use(worker):
        await worker.submit(prompts, [0, 1, 2, 3], 1, PARAMS)
        return await collect_all(worker, 4)

    batches, failures = with_worker(path, use, timeout_s=3.0)
    assert sorted(batches) == [0, 3]
    assert failures[1] == [Fault(Kind.ENVIRONMENT, "ValueError: the reward function returned NaN")]
    assert failures[2] == [Fault(Kind.TIMEOUT, "the episode took longer than rollout.timeout_s=3")]


def test_an_observation_beyond_the_vocabulary_is_rejected_and_leaves_the_engine_alone(path):
    prompts = prompts_of(2)
    prompts[1].payload["fault"] = "tokens"

    async def use(worker):
        await worker.submit(prompts, [0, 1], 1, PARAMS)
        done, failed = [], []
        while len(done) + len(failed) < 2:
            collected = await worker.collect(5.0)
            assert collected.fatal is None and collected.engine_fault is None
            done += collected.slots
            failed += collected.failures
        await worker.health()
        return done, failed

    done, [(slot, [fault])] = with_worker(path, use)
    assert done == [0] and slot == 1
    assert fault.kind is Kind.REJECTED and "the token 1000000, but the ids of the model's vocabulary end at 63" in fault.reason


def test_an_engine_that_hangs_is_told_from_an_episode_that_is_slow(path):
    """Nothing is said about the prompts of a hanging engine: they are not at fault, and are issued again elsewhere."""

    async def use(worker):
        await worker.engine.pause()
        worker.engine._closed = True  # nobody is told: requests hang, and only a question for its health finds out
        await worker.submit(prompts_of(2), [0, 1], 1, PARAMS)
        while not (collected := await worker.collect(5.0)).engine_fault:
            assert not collected.failures
        return collected

    collected = with_worker(path, use, timeout_s=1.0)
    assert (
        collected.engine_fault.kind is Kind.ENGINE
        and "closed" in collected.engine_fault.reason
        and not collected.failures
        and not collected.slots
    )


def test_an_empty_wait_returns_nothing_in_time(path):
    async def use(worker):
        return await worker.collect(0.05)

    collected = with_worker(path, use)
    assert collected.slots == [] and collected.batch is None and collected.failures == []


def test_evaluation_keeps_the_order_and_says_what_failed(path):
    async def use(worker):
        greedy = SamplingParams(max_new_tokens=6, temperature=0.0)
        first = await worker.evaluate(prompts_of(4), greedy)
        again = await worker.evaluate(prompts_of(4)[::-1], greedy)
        prompts = prompts_of(4)
        prompts[1].payload["fault"] = "fail"
        return first.batch, again.batch, await worker.evaluate(prompts, greedy), await worker.evaluate(prompts[1:2], greedy)

    first, again, some, none = with_worker(path, use)
    assert some.batch.prompt_ids == ["p0", "p2", "p3"] and none.batch is None
    fault = Fault(Kind.ENVIRONMENT, "ValueError: the reward function returned NaN")
    assert some.faults == none.faults == [("p1", fault)]
    assert first.prompt_ids == ["p0", "p1", "p2", "p3"]
    for a, b in zip(first, list(again)[::-1], strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()


@pytest.mark.parametrize("on_update", ["keep", "abort"])
def test_new_weights_reach_episodes_in_flight(path, on_update):
    new = perturbed(tiny_model(), 1)
    params = SamplingParams(max_new_tokens=100, logprobs=3)

    async def use(worker):
        await worker.submit(prompts_of(4, turns=1), [0, 1, 2, 3], 1, params)
        # All requests take one token a step together: after these ten tokens the episodes have sampled some, and not all.
        await worker.engine.generate(prompt_of(5), SamplingParams(max_new_tokens=10))
        checksum = await worker.update_weights(update_of(new, 1))
        batches, _ = await collect_all(worker, 4)
        return checksum, Batch.concat(batches.values())

    checksum, batch = with_worker(path, use, on_update=on_update, stop_token_ids=())
    assert checksum == checksum_of(new)
    for trajectory in batch:
        versions = trajectory.versions[trajectory.action_mask]
        assert len(versions) == 100 and set(versions.tolist()) == {0, 1} and (np.diff(versions) >= 0).all()


def test_the_probe_shows_the_weights_that_are_computed_with(path):
    async def use(worker):
        before = await worker.probe(prompt_of(12), 4)
        await worker.update_weights(update_of(perturbed(tiny_model(), 2), 1))
        return before, await worker.probe(prompt_of(12), 4)

    before, after = with_worker(path, use, temperature=0.7)
    assert alignment_error(tiny_model(), prompt_of(12), before, 0.7) < 1e-4
    assert alignment_error(perturbed(tiny_model(), 2), prompt_of(12), after, 0.7) < 1e-4


def test_stats_count_since_the_last_call(path):
    async def use(worker):
        await worker.submit(prompts_of(3), [0, 1, 2], 1, PARAMS)
        batches, _ = await collect_all(worker, 3)
        return batches, await worker.stats(), await worker.stats()

    batches, first, second = with_worker(path, use)
    assert first["tokens"] == sum(b.num_actions for b in batches.values()) and first["busy_s"] > 0
    assert second == {"tokens": 0.0, "busy_s": 0.0}


def test_what_travels_is_flat_arrays(path):
    """Pickled with out-of-band buffers, as Ray does, the part that is not array memory does not grow with the tokens."""

    def in_band(length):
        async def use(worker):
            prompt = replace(prompts_of(1, turns=1)[0], tokens=prompt_of(length))
            await worker.submit([prompt], [0], 1, SamplingParams(max_new_tokens=4, logprobs=32))
            return await worker.collect(5.0)

        buffers = []
        collected = with_worker(path, use)
        return len(pickle.dumps(collected, protocol=5, buffer_callback=buffers.append)), sum(len(b.raw()) for b in buffers)

    (small, small_buffers), (large, large_buffers) = in_band(4), in_band(400)
    assert large_buffers > 20 * small_buffers
    assert abs(large - small) < 100 and large < 4096


def test_an_unknown_engine_is_refused_by_name(path):
    with pytest.raises(ConfigError, match=r"rollout\.engine=vlm"):
        RolloutWorker(config_of(engine="vlm"), path)
