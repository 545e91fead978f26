"""Held-out problems have an engine of their own where rollouts come from other weights; one that is lost costs no attempt."""

import pytest

from tests.support.local_run import run
from workers.engines.protocol import EngineDeadError
from workers.rollout.worker import RolloutWorker
from workers.supervised import WorkerLost

OPTIONS = ["algorithm.advantage=none", "steps=2", "eval.every=1", "rollout.quantize=int8"]


def dying(dead: set[int], unable: set[int]):
    """A worker; of those that evaluate, in the order in which they were made, some die of an evaluation, some cannot start."""
    made = []

    class Dying(RolloutWorker):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.number = None
            if self.config.rollout.quantize is None:
                self.number = len(made)
                made.append(self)

        async def start(self):
            if self.number in unable:
                raise EngineDeadError("no memory is left")
            await super().start()

        async def evaluate(self, prompts, sampling):
            if self.number in dead:
                await self.engine.close()
            return await super().evaluate(prompts, sampling)

    return Dying, made


def test_a_lost_evaluator_is_started_until_it_is_up_and_answers_everything(tmp_path):
    plain = run(tmp_path / "plain", *OPTIONS)
    worker, made = dying(dead={0, 2}, unable={1})
    rows = run(tmp_path / "lost", *OPTIONS, "rollout.max_restarts=3", worker=worker)  # raises where an attempt would end
    assert len(made) == 4 and [row["step"] for row in rows] == [0, 1, 2]
    held_out = [{name: value for name, value in row.items() if name.startswith("eval/")} for row in rows]
    assert held_out[0] == {name: value for name, value in plain[0].items() if name.startswith("eval/")}
    assert all(row["eval/arithmetic/failed"] == 0 for row in held_out)


def test_an_evaluator_without_restarts_left_ends_the_attempt(tmp_path):
    worker, made = dying(dead={0}, unable={1, 2})
    with pytest.raises(BaseException) as caught:
        run(tmp_path, *OPTIONS, "rollout.max_restarts=2", worker=worker)
    assert caught.group_contains(WorkerLost, match="its engine did not start|no memory is left") and len(made) == 3
