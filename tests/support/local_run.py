"""A whole job in one process: the real controller, learner rank, rollout worker and torch engine, without Ray between them.

Ray's part (processes, serialisation) is tested in `test_run.py`; here many jobs run in seconds.
"""

import asyncio
import json
from pathlib import Path

from rlframe.config import serves_other_weights
from trainer.run import recovery
from trainer.run.attempts import conclude, on_signal
from trainer.run.checkpoints import Checkpoints
from trainer.run.job import evaluator_config, make_controller, read_inputs
from trainer.settings.checks import check
from trainer.settings.compose import compose
from trainer.watch.tracking import Tracker
from workers.learner import rank as learner_module
from workers.learner.group import LearnerGroup
from workers.learner.rank import LearnerRank
from workers.rollout.group import RolloutGroup
from workers.rollout.worker import RolloutWorker

SMALL = [
    "rollout=torch",
    "steps=3",
    "batch_size=8",
    "eval.size=8",
    "eval.every=0",
    "log.wandb=disabled",
    "log.console=false",
    "rollout.probe_every=1",
]


class Method:
    """``handle.method`` with Ray's ``.remote`` and ``.options(num_returns=n)``."""

    def __init__(self, function, returns=None):
        self.function, self.returns = function, returns

    def options(self, num_returns=None, concurrency_group=None):
        return Method(self.function, num_returns)

    def remote(self, *args):
        result = self.function(*args)
        if asyncio.iscoroutine(result):
            return asyncio.ensure_future(result)
        if self.returns is None:
            return done(result)
        return [done(part) for part in result]


class Handle:
    def __init__(self, target):
        self.target = target

    def __getattr__(self, name):
        return Method(getattr(self.target, name))


class Resolved:
    """What Ray does to references among the arguments: they arrive as values."""

    def share(self, batch):
        return batch


class LocalLearner(Resolved, LearnerGroup):
    async def weight_update(self, *args):
        update, checksum = await super().weight_update(*args)
        return await update, checksum


def done(value):
    future = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future


def run(
    run_dir: Path,
    *overrides: str,
    resume: bool = False,
    signals: bool = False,
    worker: type[RolloutWorker] = RolloutWorker,
    rank: type[LearnerRank] = LearnerRank,
    conclusion: bool = False,
) -> list[dict]:
    """Train with rollout workers of class ``worker`` and a ``rank``, and return the lines of ``metrics.jsonl``.

    With ``signals``, SIGTERM stops it as it stops a real run; with ``conclusion`` it ends as a real run does, else with the
    exceptions of its loops.
    """
    config = compose([f"run_dir={run_dir}", *SMALL, *overrides])
    check(config)
    for folder in ("logs", "rollouts", "checkpoints"):
        (run_dir / folder).mkdir(parents=True, exist_ok=True)
    asyncio.run(_attempt(config, run_dir, resume, signals, worker, rank, conclusion))
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def rollout_group(config, inputs, worker):
    return RolloutGroup(config, lambda i: Handle(worker(config, inputs.model_path, i)))


async def _attempt(config, run_dir, resume, signals, worker, rank, conclusion):
    learner_module._node_ip = lambda: "127.0.0.1"
    inputs = read_inputs(config)
    checkpoint = Checkpoints(run_dir, config.checkpoint).newest()[0] if resume else None
    step = recovery.read_state(checkpoint)["step"] if checkpoint else -1
    tracker = Tracker(config, run_dir, inputs.tokenizer, step)
    rollouts = rollout_group(config, inputs, worker)
    evaluators = rollout_group(evaluator_config(config), inputs, worker) if serves_other_weights(config.rollout) else rollouts
    learner = LocalLearner([Handle(rank(config, inputs.model_path, 0, None, (inputs.environment.name,)))])
    controller = None
    try:
        await asyncio.gather(*(group.start() for group in {rollouts, evaluators, learner}))
        controller = make_controller(config, inputs, run_dir, rollouts, evaluators, learner, tracker)
        if checkpoint:
            await learner.load(str(checkpoint))
            recovery.restore(controller, checkpoint)
        if signals:
            on_signal(tracker, asyncio.current_task(), controller)
        await controller.run()
    except Exception as error:
        if not conclusion:
            raise
        raise await conclude(error, controller) from None
    finally:
        for group in {rollouts, evaluators, learner}:
            await group.close()
        tracker.close()
