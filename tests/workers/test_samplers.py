"""Samplers of the server as one: what happens to requests when a sampler dies, hangs, or none is left."""

import asyncio
import os
import signal

import numpy as np
import pytest
import ray

from tests.support.engines import prompt_of
from tests.support.local_ray import Actor, kill
from tests.support.rollouts import config_of, model_folder
from workers.engines.protocol import SamplingParams
from workers.pools import Pool
from workers.rollout import sampler as sampler_module
from workers.rollout.sampler import NoSampler, SamplerGroup, SamplerWorker
from workers.supervised import MAX_LOSSES

PARAMS = SamplingParams(max_new_tokens=4)
DEADLY = 63
"""A prompt that begins with it ends the engine."""


class Recorded(SamplerWorker):
    """Knows how many requests it had."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.requests = 0

    async def sample(self, tokens, *more):
        self.requests += 1
        if tokens[0] == DEADLY:
            await self.engine.close()
        return await super().sample(tokens, *more)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


def with_group(path, use, **rollout):
    """Run ``use(group, actors)``; ``actors`` are the handles of all that were ever made, in their order."""
    config, actors = config_of(**{"workers": 2, **rollout}), []

    def spawn(index):
        actors.append(Actor(Recorded, config, path, index, None))
        return actors[-1]

    async def main():
        group = SamplerGroup(config, spawn, kill=kill)
        await group.start()
        try:
            return await use(group, actors)
        finally:
            await group.close()

    return asyncio.run(main())


def ask(group, count, prompt=None):
    """``count`` requests of one sample each, on their way."""
    tokens = prompt_of(5) if prompt is None else prompt
    return [asyncio.ensure_future(group.sample(tokens, PARAMS, 1, None)) for _ in range(count)]


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


async def has_all(group, count=2):
    await until(lambda: len(group.up()) == count)


def lengths(answers):
    return [len(completion.ids) for (completion,) in answers]


def test_a_sampler_that_is_lost_gets_no_more_requests(path):
    async def use(group, actors):
        await actors[0].instance.engine.close()
        first = await asyncio.gather(*ask(group, 1))
        found = actors[0].instance.requests
        later = []
        for _ in range(10):
            later += await asyncio.gather(*ask(group, 4))
        return lengths(first + later), found, [actor.instance.requests for actor in actors], group.up()

    answers, found, requests, up = with_group(path, use, max_restarts=0)
    assert answers == [4] * 41 and found <= 1 and requests == [found, 41] and up == [1]


def test_what_a_killed_sampler_had_is_answered_by_another_and_it_is_started_again(path):
    async def use(group, actors):
        await actors[0].instance.engine.pause()
        requests = ask(group, 6)
        await until(lambda: actors[0].instance.requests == 3)
        kill(actors[0])
        answers = await asyncio.gather(*requests)
        await has_all(group)
        again = await asyncio.gather(*ask(group, 4))
        return lengths(answers + again), [actor.instance.requests for actor in actors], group.workers[0].restarts

    answers, requests, restarts = with_group(path, use)
    assert answers == [4] * 10 and restarts == 1
    assert requests[0] == 3 and sum(requests) == 13 and requests[2] >= 1, "three of six were sent twice"


def test_a_sampler_that_says_nothing_is_lost_and_its_requests_are_not(path, monkeypatch, caplog):
    monkeypatch.setattr(sampler_module, "WATCH_S", 0.01)

    async def use(group, actors):
        actors[0].instance.engine.health = lambda: asyncio.sleep(3600)
        await actors[0].instance.engine.pause()
        answers = await asyncio.gather(*ask(group, 4))
        await has_all(group)
        return lengths(answers)

    assert with_group(path, use, timeout_s=3.0) == [4] * 4
    assert "Sampler 0 is lost: it did not answer health() within 3 s. It is started again" in caplog.text


def test_one_sampler_that_answers_is_enough_to_be_ready(path):
    async def use(group, actors):
        actors[0].instance.engine.health = lambda: asyncio.sleep(3600)
        return await group.health()

    assert with_group(path, use) is None


def test_requests_wait_for_the_only_sampler_to_come_back(path):
    async def use(group, actors):
        kill(actors[0])
        return lengths(await asyncio.gather(*ask(group, 3))), len(actors)

    assert with_group(path, use, workers=1) == ([4] * 3, 2)


def test_a_request_that_takes_every_sampler_down_is_given_up_and_others_are_answered(path):
    async def use(group, actors):
        with pytest.raises(NoSampler, match=rf"The {MAX_LOSSES} samplers that had this request were lost; it is taken for"):
            await group.sample(np.array([DEADLY, 4, 5], np.int32), PARAMS, 1, None)
        await has_all(group)
        return lengths(await asyncio.gather(*ask(group, 2)))

    assert with_group(path, use) == [4] * 2


def test_without_a_sampler_requests_are_answered_with_one_sentence(path):
    async def use(group, actors):
        requests = ask(group, 4)
        for actor in actors:
            kill(actor)
        told = await asyncio.gather(*requests, *ask(group, 1), group.health(), return_exceptions=True)
        return {str(answer) for answer in told}, [type(answer) for answer in told]

    told, kinds = with_group(path, use, max_restarts=0)
    assert kinds == [NoSampler] * 6
    assert told == {
        "No sampler is left, each having used up rollout.max_restarts=0; training continues, sampling needs the server "
        "started again."
    }


def test_a_sampler_has_no_more_requests_at_once_than_it_may(path):
    async def use(group, actors):
        engine = actors[0].instance.engine
        await engine.pause()
        requests = ask(group, 7)
        await until(lambda: actors[0].instance.requests == 2)
        for _ in range(100):
            await asyncio.sleep(0)
        at_once = actors[0].instance.requests
        await engine.resume()
        return at_once, lengths(await asyncio.gather(*requests)), actors[0].instance.requests

    assert with_group(path, use, workers=1, max_concurrency=2) == (2, [4] * 7, 7)


@pytest.fixture(scope="module")
def real_ray():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_ends_or_hangs_takes_no_request_with_it(real_ray, path, number):
    config = config_of(workers=2, timeout_s=15.0, cpus=0.5)

    async def main():
        group = SamplerGroup.launch(config, path, None, Pool(None, (0, 1)))
        await group.start()
        try:
            pids = [await worker._actor.__ray_call__.remote(lambda _: os.getpid()) for worker in group.workers]
            long = SamplingParams(max_new_tokens=300)
            requests = [asyncio.ensure_future(group.sample(prompt_of(5), long, 1, None)) for _ in range(8)]
            while not all(worker.in_flight for worker in group.workers):
                await asyncio.sleep(0.01)
            os.kill(pids[0], number)
            answers = await asyncio.gather(*requests)
            await has_all(group)
            again = await asyncio.gather(*ask(group, 4))
            return lengths(answers), lengths(again), group.workers[0].restarts, pids
        finally:
            await group.close()

    answers, again, restarts, pids = asyncio.run(main())
    assert answers == [300] * 8 and again == [4] * 4 and restarts >= 1 and pids[0] != pids[1]
