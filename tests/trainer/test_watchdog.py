"""A run that cannot go on says why, in one sentence, and ends."""

import asyncio
import re

import pytest
from local import run

from trainer.failures import RunFailed
from trainer.watchdog import Stuck, Watchdog
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
        r"The learner .* for a batch: worker 1 has 3 prompts\. The run ends at cluster\.watchdog_s=0\.2\.", warning
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


@pytest.mark.slow
def test_a_run_whose_rewards_never_return_ends_with_the_reason(tmp_path, capsys):
    with pytest.raises(ExceptionGroup) as failure:
        run(tmp_path, "task.name=fault_support:Hanging", "cluster.watchdog_s=4", "max_staleness=0", "log.console=true")
    (reason,) = failure.value.exceptions
    assert isinstance(reason, RunFailed)
    pattern = r"has waited \d+ s for the oldest batch of rollouts: rollout worker 0 has 8 prompts\. "
    assert re.search(pattern + "What every loop", str(reason)) and re.search(
        pattern + "The run ends at", capsys.readouterr().out
    )
    dump = (tmp_path / "logs" / "stuck.txt").read_text()
    assert "collect_0 has waited" in dump and "Controller.train_step" in dump and "Buffer.take" in dump and "never" in dump


@pytest.mark.slow
def test_rewards_that_never_return_cost_their_prompts_and_are_counted(tmp_path):
    with pytest.raises(ExceptionGroup, match="") as failure:
        run(tmp_path, "task.name=fault_support:Hanging", "rollout.timeout_s=1", "max_staleness=0")
    assert "8 rollouts in a row failed, the last one because: timed out" in str(failure.value.exceptions[0])


class Doomed(RolloutWorker):
    """Its engine dies with the first training prompt."""

    async def submit(self, prompts, slots, rollouts, sampling):
        await super().submit(prompts, slots, rollouts, sampling)
        await self.engine.close()


@pytest.mark.slow
def test_a_run_ends_when_no_worker_can_come_back(tmp_path):
    options = ["rollout.workers=2", "rollout.max_restarts=0", "max_staleness=0"]
    with pytest.raises(ExceptionGroup) as failure:
        run(tmp_path, *options, worker=Doomed)
    assert re.fullmatch(
        r"No rollout worker is left, each having used up rollout\.max_restarts=0\. Rollout worker \d is lost: .* closed .*\.",
        str(failure.value.exceptions[0]),
    )
