"""Rollout workers and nodes are taken away from a run; it ends with the numbers of one that lost nothing."""

import asyncio
import json
import os

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.support import local_run as local
from tests.support.kill_points import numbers
from tests.support.processes import PATIENCE_S, alive, wait_for
from trainer.cluster.placement import plan
from trainer.run.job import make_controller, read_inputs
from trainer.settings.checks import check
from trainer.settings.compose import compose
from trainer.watch.tracking import Tracker
from workers.learner.group import LearnerGroup
from workers.learner.roles import critic_names
from workers.pools import reserve
from workers.rollout.group import RolloutGroup

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(900)]  # also of a machine that does much else
OPTIONS = [
    "steps=5",
    "max_staleness=0",
    "rollout.workers=2",
    "rollout.timeout_s=8",
    "rollout.max_restarts=50",
    "task.name=tests.support.faults:Faulty",
    "log.rollouts_every=1",
]


class WaitingLearner(LearnerGroup):
    """The learner, which can be told to wait."""

    def __init__(self, ranks):
        super().__init__(ranks)
        self.may_learn = asyncio.Event()
        self.may_learn.set()

    async def values(self, batch):
        await self.may_learn.wait()
        return await super().values(batch)


def pool(request):
    return reserve([request], PATIENCE_S, lambda: None)[request.name]


async def until(condition):
    """Wait for a condition; unlike a thread that waits, this ends when it is cancelled."""
    while not condition():
        await asyncio.sleep(0.1)


def run_on(cluster, run_dir, marks):
    """A job on a cluster that has room for the learner and one rollout worker on its head, and a node for the other."""
    config = compose([f"run_dir={run_dir}", *local.SMALL, *OPTIONS, f"task.options.marks={marks}"])
    check(config)
    for folder in ("logs", "rollouts", "checkpoints"):
        (run_dir / folder).mkdir(parents=True)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="warning")

    async def attempt():
        inputs = read_inputs(config)
        tracker = Tracker(config, run_dir, inputs.tokenizer, -1)
        requests = {group.name: group for group in plan(config).groups}
        logs = str(run_dir / "logs")
        learner = WaitingLearner.launch(config, inputs.model_path, logs, pool(requests["learner"]), critic_names(config))
        await learner.start()
        doomed = cluster.add_node(num_cpus=1)
        (marks / "doomed").write_text(doomed.node_id)
        rollouts = RolloutGroup.launch(config, inputs.model_path, logs, pool(requests["rollout"]))
        await rollouts.start()
        controller = make_controller(config, inputs, run_dir, rollouts, rollouts, learner, tracker)

        async def all_back(restarts):
            """Learning waits until both workers are up again, so that the next fault finds them there."""
            await until(lambda: controller.faults.counts["worker_restarts"] >= restarts and rollouts.up() == [0, 1])
            learner.may_learn.set()

        async def replace_node():
            await until(lambda: (marks / "killed").exists() and (marks / "stopped").exists())
            learner.may_learn.clear()
            await all_back(2)
            await until((marks / "reached").exists)
            learner.may_learn.clear()
            cluster.remove_node(doomed, allow_graceful=False)
            cluster.add_node(num_cpus=1)
            await all_back(3)

        try:
            async with asyncio.TaskGroup() as together:
                together.create_task(controller.run())
                together.create_task(replace_node())
        finally:
            await rollouts.close()
            await learner.close()
            tracker.close()

    try:
        asyncio.run(attempt())
    finally:
        ray.shutdown()


def trained(run_dir):
    """Prompts by step."""
    files = sorted((run_dir / "rollouts").glob("step_*.jsonl"))
    return [[json.loads(line)["prompt_id"] for line in file.read_text().splitlines()] for file in files]


def test_lost_workers_and_nodes_cost_a_run_nothing_but_time(tmp_path, monkeypatch):
    monkeypatch.chdir(os.path.dirname(__file__))
    marks, calm = tmp_path / "marks", tmp_path / "calm"
    for folder in (marks, calm):
        folder.mkdir()
    for mark in ("killed", "stopped", "reached"):
        (calm / mark).touch()
    (calm / "doomed").touch()
    expected = local.run(tmp_path / "expected", *OPTIONS, f"task.options.marks={calm}")

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        run_on(cluster, tmp_path / "faulty", marks)
    finally:
        cluster.shutdown()
    rows = [json.loads(line) for line in (tmp_path / "faulty" / "metrics.jsonl").read_text().splitlines()]

    assert {path.name for path in marks.iterdir()} == {"doomed", "killed", "stopped", "reached"}
    assert rows[-1]["fault/worker_restarts"] >= 3 and rows[-1]["fault/reissued"] >= 3
    assert rows[-1]["fault/dropped"] == 0
    without = [{name: value for name, value in row.items() if not name.startswith("fault/")} for row in rows]
    assert numbers(without) == [{n: v for n, v in row.items() if not n.startswith("fault/")} for row in numbers(expected)]
    assert trained(tmp_path / "faulty") == trained(tmp_path / "expected")
    pids = [int((marks / mark).read_text()) for mark in ("killed", "stopped", "reached")]
    wait_for(lambda: not any(map(alive, pids)))
