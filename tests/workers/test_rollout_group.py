"""Many workers as one: where prompts go, and what happens to them when a worker is lost, in its engine or by its silence."""

import asyncio
from collections import Counter

import pytest

from tests.support.engines import checksum_of, perturbed, tiny_model, update_of
from tests.support.local_ray import Actor, kill
from tests.support.rollouts import config_of, model_folder, prompts_of
from workers.engines.protocol import SamplingParams
from workers.faults import Fault, Kind
from workers.rollout.group import RolloutGroup
from workers.rollout.worker import RolloutWorker
from workers.supervised import MAX_LOSSES, StartFailed, WorkerLost

PARAMS = SamplingParams(max_new_tokens=6)


class Recorded(RolloutWorker):
    """Knows which prompts it had; a deadly one ends its engine."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.sampled = []

    async def _piece(self, episode):
        self.sampled.append(episode.prompt.index)
        if episode.prompt.payload.get("deadly"):
            await self.engine.close()
        return await super()._piece(episode)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


def with_group(path, use, **rollout):
    """Run ``use(group, actors)``; ``actors`` are the objects behind all that were ever made, in their order."""
    config, actors = config_of(**{"workers": 2, **rollout}), []

    def spawn(index):
        actor = Actor(Recorded, config, path, index)
        actors.append(actor.instance)
        return actor

    async def main():
        group = RolloutGroup(config, spawn, kill=kill)
        await group.start()
        await group.admit(range(len(group.workers)))
        try:
            return await use(group, actors)
        finally:
            await group.close()

    return asyncio.run(main())


async def collect_all(group):
    """How often each slot came back, and which workers were lost, until no other worker has a prompt."""
    came, losses = Counter(), {}
    while busy := [w.index for w in group.workers if w.in_flight and w.index not in losses]:
        for worker in busy:
            try:
                collected = await group.collect(worker)
            except WorkerLost as loss:
                losses[worker] = str(loss)
                continue
            came.update(collected.slots)
            came.update(slot for slot, _ in collected.failures)
    return came, losses


def test_every_episode_stays_where_it_began_and_workers_share_alike(path):
    async def use(group, actors):
        turns = [Counter(), Counter()]
        for actor, count in zip(actors, turns, strict=True):
            generate = actor.engine.generate

            async def recorded(tokens, params, generate=generate, count=count):
                count[tokens[:4].tobytes()] += 1
                return await generate(tokens, params)

            actor.engine.generate = recorded
        prompts = prompts_of(8, turns=3)
        await group.submit(prompts, list(range(8)), 1, PARAMS)
        await collect_all(group)
        return turns, [prompt.tokens[:4].tobytes() for prompt in prompts]

    (first, second), prompts = with_group(path, use)
    assert len(first) == len(second) == 4 and set(first) | set(second) == set(prompts)
    assert set((first | second).values()) == {3}, "all three turns"


def test_a_prompt_goes_to_the_worker_with_the_fewest_in_flight(path):
    async def use(group, actors):
        await group.submit(prompts_of(3, fault="hang"), [0, 1, 2], 1, PARAMS)
        await group.submit(prompts_of(4, fault="hang"), [3, 4, 5, 6], 1, PARAMS)
        return [sorted(worker.in_flight) for worker in group.workers]

    assert with_group(path, use) == [[0, 2, 4, 6], [1, 3, 5]]


def test_prompts_of_a_dead_engine_come_back_from_the_other_worker_each_once(path):
    async def use(group, actors):
        prompts = prompts_of(12)
        await actors[0].engine.pause()
        await group.submit(prompts, list(range(12)), 1, PARAMS)
        await actors[0].engine.close()
        came, losses = await collect_all(group)
        reissued, given_up, _ = await group.reissue(0)
        later, _ = await collect_all(group)
        return came + later, losses, reissued, given_up

    came, losses, reissued, given_up = with_group(path, use)
    assert came == Counter(range(12)) and reissued == 6 and not given_up
    assert losses == {0: "Rollout worker 0 is lost: The torch engine was closed while requests were in flight."}


def test_without_a_worker_prompts_wait_until_one_is_back_and_admitted(path):
    async def use(group, actors):
        group.workers[0].lose("it was taken away")
        await group.submit(prompts_of(2), [0, 1], 1, PARAMS)
        state = group.state()
        await group.workers[0].restart()
        assert not actors[1].sampled, "it does not serve the current weights yet"
        served = await group.update_weights(update_of(perturbed(tiny_model(), 3), 7), [0])
        assert not actors[1].sampled and served == {0: checksum_of(perturbed(tiny_model(), 3))}
        await group.admit([0])
        came, _ = await collect_all(group)
        return came, state, len(actors), actors[1].engine.version

    came, state, made, version = with_group(path, use, workers=1)
    assert came == Counter([0, 1]) and made == 2 and version == 7
    assert state == "rollout worker 0 is not up, 2 prompts wait for a worker"


def test_a_prompt_that_takes_every_worker_down_is_given_up(path):
    async def use(group, actors):
        (prompt,) = prompts_of(1, deadly=True)
        await group.submit([prompt], [5], 1, PARAMS)
        for lost in range(1, MAX_LOSSES + 1):
            _, losses = await collect_all(group)
            reissued, given_up, _ = await group.reissue(0)
            assert losses and (reissued, given_up) == ((1, []) if lost < MAX_LOSSES else (0, [5]))
            await group.workers[0].restart()
            await group.update_weights(update_of(tiny_model(), lost), [0])
            await group.admit([0])

    with_group(path, use, workers=1)


def test_weights_and_evaluations_do_not_wait_for_a_worker_that_says_nothing(path):
    async def use(group, actors):
        actors[0].engine.load_weights = lambda update: asyncio.sleep(3600)
        served = await group.update_weights(update_of(tiny_model(), 1), [0, 1])
        batch = await group.evaluate(prompts_of(4), SamplingParams(max_new_tokens=3, temperature=0.0))
        return served, batch.batch.prompt_ids, group.up(), str(group.workers[0].failure), await group.stats()

    served, prompts, up, loss, stats = with_group(path, use, timeout_s=2.0)
    assert served == {1: checksum_of(tiny_model())} and up == [1]
    assert sorted(prompts) == ["p0", "p1", "p2", "p3"]
    assert "rollout.timeout_s=2" in loss or "within 2 s" in loss
    assert len(stats) == 2 and stats[0]["busy_s"] == 0 and stats[1]["tokens"] > 0


def test_an_evaluation_whose_worker_dies_is_done_by_another(path):
    async def use(group, actors):
        await actors[0].engine.close()
        batch = await group.evaluate(prompts_of(4), SamplingParams(max_new_tokens=3, temperature=0.0))
        return batch.batch.prompt_ids, group.up()

    prompts, up = with_group(path, use)
    assert prompts == ["p0", "p2", "p1", "p3"] and up == [1]


def test_an_evaluation_without_anybody_to_bring_workers_back_says_so(path):
    async def use(group, actors):
        for actor in actors:
            await actor.engine.close()
        with pytest.raises(WorkerLost, match="No worker is up"):
            await group.evaluate(prompts_of(4), SamplingParams(max_new_tokens=3, temperature=0.0), wait=False)

    with_group(path, use)


def test_a_worker_that_was_restarted_too_often_has_no_restarts_left(path):
    async def use(group, actors):
        left = []
        for _ in range(3):
            left.append(group.workers[0].restarts_left)
            group.workers[0].lose("it was taken away")
            await group.workers[0].restart()
        return left

    assert with_group(path, use, max_restarts=2) == [2, 1, 0]


def test_what_is_known_of_an_evaluation_changes_while_it_lasts(path):
    """Three of four episodes end, and the group knows it before the fourth, which hangs, has come to its time limit."""

    async def use(group, actors):
        prompts = prompts_of(4)
        prompts[3].payload["fault"] = "hang"
        before = group.progress()
        evaluating = asyncio.ensure_future(group.evaluate(prompts, SamplingParams(max_new_tokens=3, temperature=0.0)))
        while group.workers[0].progress < 3:
            await asyncio.sleep(0.05)
        assert not evaluating.done() and group.progress() != before
        return await evaluating

    evaluation = with_group(path, use, workers=1, timeout_s=6.0)
    assert evaluation.batch.prompt_ids == ["p0", "p1", "p2"]
    assert evaluation.faults == [("p3", Fault(Kind.TIMEOUT, "the episode took longer than rollout.timeout_s=6"))]


def test_a_long_evaluation_has_no_time_limit_beside_those_of_its_episodes(path):
    """Four episodes one after the other, of which three take all their time; the worker is not taken for lost."""

    async def use(group, actors):
        prompts = prompts_of(4)
        for prompt in prompts[:3]:
            prompt.payload["fault"] = "hang"
        evaluation = await group.evaluate(prompts, SamplingParams(max_new_tokens=3, temperature=0.0))
        return evaluation, group.up()

    evaluation, up = with_group(path, use, workers=1, timeout_s=1.0, max_concurrency=1)
    assert evaluation.batch.prompt_ids == ["p3"] and len(evaluation.faults) == 3 and up == [0]


def test_an_engine_that_cannot_start_says_why_and_is_not_started_again(path):
    class Full(Recorded):
        async def start(self):
            raise MemoryError("no room for\nthe key-value cache")

    made = []

    def spawn(index):
        made.append(Actor(Full, config_of(workers=1), path, index))
        return made[-1]

    async def main():
        await RolloutGroup(config_of(workers=1), spawn, "/runs/x/logs", kill).start()

    sentence = r"(?s)^Rollout worker 0 cannot start: MemoryError: no room for.the key-value cache\. Its log is /runs/x/logs/"
    with pytest.raises(StartFailed, match=sentence):
        asyncio.run(main())
    assert len(made) == 1


def test_a_worker_that_came_back_during_a_sync_is_not_taken_for_one_that_has_the_weights(path):
    """The first worker takes the weights and is lost while the second one still loads; its new actor has those of the base."""

    async def use(group, actors):
        update, may_load = update_of(perturbed(tiny_model(), 1), version=1), asyncio.Event()
        load = actors[1].engine.load_weights

        async def slow(update):
            await may_load.wait()
            return await load(update)

        actors[1].engine.load_weights = slow
        sync = asyncio.ensure_future(group.update_weights(update, [0, 1]))
        while actors[0].engine.version != 1:
            await asyncio.sleep(0.01)
        group.workers[0].lose("its node is gone")
        restart = asyncio.ensure_future(group.workers[0].restart())
        await asyncio.sleep(0)
        with pytest.raises(WorkerLost, match="Rollout worker 0 was replaced"):
            await group.workers[0].call("probe", prompts_of(1)[0].tokens, 0)
        await restart
        may_load.set()
        assert set(await sync) == {0, 1}
        assert set(await group.probe(prompts_of(1)[0].tokens, 0, [0, 1])) == {1}
        await group.admit([0, 1])
        missed = group.up()
        await group.update_weights(update, [0])
        await group.admit([0])
        return missed, group.up()

    assert with_group(path, use) == ([1], [0, 1])
