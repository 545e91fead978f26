"""A run that cannot continue says why, in one sentence, and ends."""

import asyncio
import re

import pytest

from rlframe.config import ConfigError
from tests.support.local_run import run
from trainer.run import watchdog as watchdog_module
from trainer.run.watchdog import Stuck, Watchdog
from workers.rollout.worker import RolloutWorker


def test_a_stuck_loop_is_first_reported_and_then_ends_the_run_with_a_dump(tmp_path):
    said = []
    watchdog = Watchdog(0.2, tmp_path / "stuck.txt", said.append)

    async def scenario():
        watchdog.waits("learn", "a batch", lambda: "worker 1 has 3 prompts")
        watchdog.waits("issue", "a free slot")
        await asyncio.gather(watchdog.watch(), asyncio.sleep(3600))

    with pytest.raises(Stuck, match=r"^The learner has waited \d+ s for a batch: worker 1 has 3 prompts\. .*stuck\.txt\.$"):
        asyncio.run(scenario())
    (warning,) = said
    assert re.fullmatch(
        r"The learner .* for a batch: worker 1 has 3 prompts\. After cluster\.watchdog_s=0\.2 without progress the run ends\.",
        warning,
    )
    dump = (tmp_path / "stuck.txt").read_text()
    assert "issue has waited 0 s for a free slot" in dump and ".scenario" in dump, "loops, and where every task stands"


def test_a_loop_that_moves_is_left_alone(tmp_path):
    """What it waits for changes before each limit, however long it all takes."""
    watchdog = Watchdog(3600.0, tmp_path / "stuck.txt", print)

    async def scenario():
        watching = asyncio.ensure_future(watchdog.watch())
        for i in range(5):
            watchdog.waits("learn", f"thing {i}")
            await asyncio.sleep(0)
        assert not watching.done()
        watching.cancel()

    asyncio.run(scenario())
    assert not (tmp_path / "stuck.txt").exists()


class Clock:
    """Stands where ``time`` and ``asyncio.sleep`` do; ``at`` has what happens when."""

    def __init__(self, monkeypatch, at):
        self.now, self.at = 0.0, at
        monkeypatch.setattr(watchdog_module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(watchdog_module.asyncio, "sleep", self.sleep)

    async def sleep(self, seconds):
        self.now += seconds
        self.at(self.now)


def test_a_batch_that_takes_long_lives_while_episodes_end_and_dies_when_none_does(tmp_path, monkeypatch):
    """Of ten units each a limit long, episodes end during the first nine."""
    said, ended = [], [0]

    def at(now):
        if now <= 90 and int(now) % 6 == 0:
            ended[0] += 1

    clock = Clock(monkeypatch, at)
    watchdog = Watchdog(10.0, tmp_path / "stuck.txt", said.append)
    watchdog.waits("learn", "a batch", progress=lambda: ended[0])
    with pytest.raises(Stuck, match=r"has waited 10\d s for a batch, 1\d s of them without progress\."):
        asyncio.run(watchdog.watch())
    assert 99 <= clock.now <= 102


def test_a_time_limit_of_the_watchdog_inside_of_which_no_episode_may_end_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"rollout\.timeout_s=600 .* cluster\.watchdog_s=600 .* raise cluster\.watchdog_s"):
        run(tmp_path, "cluster.watchdog_s=600")


@pytest.mark.slow
def test_rewards_that_never_return_cost_their_prompts_and_are_counted(tmp_path):
    with pytest.raises(ExceptionGroup) as failure:
        run(tmp_path, "task.name=tests.support.faults:Hanging", "rollout.timeout_s=1", "max_staleness=0")
    reason = "8 rollouts in a row failed, the last one because: the episode took longer than rollout.timeout_s=1"
    assert reason in str(failure.value.exceptions[0])


class EngineDiesAtOnce(RolloutWorker):
    """Its engine dies with the first training prompt."""

    async def submit(self, prompts, slots, rollouts, sampling):
        await super().submit(prompts, slots, rollouts, sampling)
        await self.engine.close()


@pytest.mark.slow
def test_a_run_ends_when_no_worker_can_come_back(tmp_path):
    options = ["rollout.workers=2", "rollout.max_restarts=0", "max_staleness=0"]
    with pytest.raises(ExceptionGroup) as failure:
        run(tmp_path, *options, worker=EngineDiesAtOnce)
    assert re.fullmatch(
        r"No rollout worker is left, each having used up rollout\.max_restarts=0\. Rollout worker \d is lost: .* closed .*\.",
        str(failure.value.exceptions[0]),
    )
