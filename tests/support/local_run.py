"""A whole job in one process: the real controller, learner rank, rollout worker and torch engine; `local_ray` between them.

Ray's part (processes) is tested in `test_run.py`; here many jobs run in seconds.
"""

import asyncio
import json
from pathlib import Path

from tests.support.local_ray import Actor, kill, put
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
from workers.learner.roles import critic_names
from workers.rollout.group import RolloutGroup
from workers.rollout.settings import serves_other_weights
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


class LocalLearner(LearnerGroup):
    def put(self, batch):
        return put(batch)


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
    return RolloutGroup(config, lambda i: Actor(worker, config, inputs.model_path, i), kill=kill)


async def _attempt(config, run_dir, resume, signals, worker, rank, conclusion):
    learner_module._node_ip = lambda: "127.0.0.1"
    inputs = read_inputs(config)
    checkpoint = Checkpoints(run_dir, config.checkpoint).newest()[0] if resume else None
    step = recovery.read_state(checkpoint)["step"] if checkpoint else -1
    tracker = Tracker(config, run_dir, inputs.tokenizer, step)
    rollouts = rollout_group(config, inputs, worker)
    evaluators = rollout_group(evaluator_config(config), inputs, worker) if serves_other_weights(config.rollout) else rollouts
    learner = LocalLearner([Actor(rank, config, inputs.model_path, 0, None, critic_names(config))])
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
