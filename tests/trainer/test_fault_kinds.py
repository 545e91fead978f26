"""Each kind of fault in a whole run: what is counted, what is tried again, what ends the run; a resume then continues it."""

import asyncio
import re
from pathlib import Path
from typing import ClassVar

import pytest

from tests.support import faults as fault_support
from tests.support.checkpoints import save
from tests.support.faulty_workers import IgnoresNewWeights
from tests.support.kill_points import numbers
from tests.support.local_run import run
from trainer.run import attempts
from trainer.run.checkpoints import Checkpoints
from trainer.run.failures import RunFailed, WorkerDied
from trainer.run.faults import COUNTERS, TREATMENT, as_markdown
from trainer.settings.config import Config
from trainer.settings.sections import CheckpointConfig
from workers.faults import Kind
from workers.learner.rank import LearnerRank
from workers.rollout.worker import RolloutWorker

BREAKING = ["task.name=tests.support.faults:Breaking", "max_staleness=0", "steps=2"]
DROPPED = [Kind.TIMEOUT, Kind.REWARD, Kind.ENVIRONMENT, Kind.REJECTED]


def faults_of(row):
    """The counters that are not 0."""
    found = {name.removeprefix("fault/"): value for name, value in row.items() if name.startswith("fault/")}
    assert set(found) == set(COUNTERS)
    return {name: value for name, value in found.items() if value}


def broken(kind, *more):
    return [*BREAKING, f"task.options.fault={kind}", *more, *(["rollout.timeout_s=2"] if kind == "timeout" else [])]


@pytest.mark.slow
@pytest.mark.parametrize("kind", DROPPED)
def test_a_rollout_that_fails_is_counted_under_its_kind_and_not_tried_again(tmp_path, kind):
    """Prompts 0, 6, 12, 18: four of the first 20, of which 16 train."""
    rows = run(tmp_path, *broken(kind, "task.options.every=6", "task.options.until=20"))
    assert faults_of(rows[-1]) == {"dropped": 4, TREATMENT[kind].counter: 4}
    assert rows[-1]["off_policy/dropped"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", DROPPED)
def test_nothing_but_failures_ends_the_run_and_a_resume_continues_it(tmp_path, kind):
    with pytest.raises(RunFailed, match=r"^8 rollouts in a row failed, .* `rlframe resume .*` continues after step 1\.$"):
        run(tmp_path, *broken(kind, "task.options.first=8"), conclusion=True)
    rows = run(tmp_path, *BREAKING, resume=True)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert faults_of(rows[1]) == {} and faults_of(rows[2]) == {"dropped": 8, TREATMENT[kind].counter: 8}


@pytest.mark.slow
def test_of_a_group_the_rollouts_that_fail_are_counted_and_the_rest_trains(tmp_path):
    class FailingRequests(RolloutWorker):
        """Every fourth of the first requests fails in the engine."""

        def __init__(self, *arguments):
            super().__init__(*arguments)
            generate, calls = self.engine.generate, iter(range(10**6))

            async def sometimes(tokens, params):
                if params.logprobs and (call := next(calls)) < 16 and call % 4 == 3:
                    raise RuntimeError("an illegal memory access")
                return await generate(tokens, params)

            self.engine.generate = sometimes

    groups = ["algorithm.advantage=group", "algorithm.rollouts_per_prompt=4", "rollout.probe_every=0"]
    rows = run(tmp_path, *BREAKING, *groups, worker=FailingRequests)
    assert faults_of(rows[-1]) == {"dropped": 4, "engine": 4, "partial_groups": 4}


class EngineDiesOnce(RolloutWorker):
    """Its engine dies with the first training prompts, once."""

    died: ClassVar[list] = []

    async def submit(self, *arguments):
        await super().submit(*arguments)
        if not self.died:
            self.died.append(True)
            await self.engine.close()


@pytest.mark.slow
def test_the_prompts_of_a_dead_engine_are_sent_again_and_none_is_dropped(tmp_path):
    EngineDiesOnce.died.clear()
    rows = run(tmp_path / "faulty", *BREAKING, worker=EngineDiesOnce)
    assert faults_of(rows[-1]) == {"reissued": 8, "worker_restarts": 1}
    calm = run(tmp_path / "calm", *BREAKING)
    assert [row["reward/mean"] for row in rows[1:]] == [row["reward/mean"] for row in calm[1:]]


class EngineDiesAtStepTwo(RolloutWorker):
    """Its engine dies with the training prompts of the second step, each time."""

    async def submit(self, prompts, *arguments):
        await super().submit(prompts, *arguments)
        if prompts[-1].index >= 8:
            await self.engine.close()


@pytest.mark.slow
def test_engines_that_die_too_often_end_the_run_and_a_resume_continues_it(tmp_path):
    with pytest.raises(RunFailed, match=r"No rollout worker is left.*continues after step 1\.$"):
        run(tmp_path, *BREAKING, "rollout.max_restarts=1", worker=EngineDiesAtStepTwo, conclusion=True)
    rows = run(tmp_path, *BREAKING, resume=True)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert faults_of(rows[-1]) == {"reissued": 16, "worker_restarts": 1}


@pytest.mark.slow
def test_prompts_that_take_every_worker_down_are_dropped_as_what_took_it(tmp_path):
    with pytest.raises(RunFailed, match=r"^8 rollouts in a row failed, .*every worker that had it was lost.*after step 1\.$"):
        run(tmp_path, *BREAKING, worker=EngineDiesAtStepTwo, conclusion=True)
    rows = run(tmp_path, *BREAKING, resume=True)
    assert faults_of(rows[-1]) == {"dropped": 8, "engine": 8, "reissued": 16, "worker_restarts": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sentence"), [("fatal", "it is time to stop"), ("nan", "The environment returned the reward nan")]
)
def test_a_fatal_reward_ends_the_run_between_two_steps_and_nothing_is_lost(tmp_path, kind, sentence):
    with pytest.raises(RunFailed, match=rf"^{sentence}.* continues after step 1\.$"):
        run(tmp_path / "cut", *broken(kind, "task.options.first=8"), conclusion=True)
    resumed, whole = run(tmp_path / "cut", *BREAKING, resume=True), run(tmp_path / "whole", *BREAKING)
    assert numbers(resumed) == numbers(whole)


class Slow(LearnerRank):
    """Its update lasts until a rollout has failed beside it, and been heard of."""

    async def update_actor(self, *arguments):
        fault_support.SIGNS.add("updating")
        while "raised" not in fault_support.SIGNS:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        return super().update_actor(*arguments)


@pytest.mark.slow
def test_while_a_batch_is_learned_from_a_fault_waits_for_its_end(tmp_path):
    """With ``max_staleness=2`` the ninth prompt is under way beside the update."""
    fault_support.SIGNS.clear()
    late = ["max_staleness=2", "task.options.first=8", "task.options.until=9"]
    with pytest.raises(RunFailed, match=r"^it is time to stop.* continues after step 1\.$"):
        run(tmp_path, *broken("late"), *late, rank=Slow, conclusion=True)
    rows = run(tmp_path, *BREAKING, late[0], resume=True)
    assert [row["step"] for row in rows] == [0, 1, 2] and faults_of(rows[-1]) == {}


@pytest.mark.slow
def test_held_out_episodes_that_fail_are_left_out_up_to_a_share(tmp_path):
    eight = ["task.options.held_out=true", "task.options.every=5"]  # episodes 0 and 5 of eight
    rows = run(tmp_path / "some", *broken("environment", *eight), "eval.max_failed=0.25")
    assert [row["eval/arithmetic/failed"] for row in (rows[0], rows[-1])] == [0.25, 0.25]
    assert faults_of(rows[-1]) == {}, "these are of training rollouts"
    sentence = (
        r"^2 of 8 held-out episodes failed, more than eval\.max_failed=0\.2 of them, the first \(environment, prompt '.*'\)"
    )
    with pytest.raises(RunFailed, match=sentence + r" because: TimeoutError: the tool ran out of time\.$"):
        run(tmp_path / "many", *broken("environment", *eight), "eval.max_failed=0.2", conclusion=True)
    assert not any((tmp_path / "many" / "checkpoints").iterdir()), "nothing had been made"


@pytest.mark.slow
def test_weights_that_do_not_arrive_end_the_run_with_the_actor_s_saved(tmp_path):
    with pytest.raises(RunFailed, match=r"serves weights with checksum .* continues after step 1\.$"):
        run(tmp_path / "cut", *BREAKING, worker=IgnoresNewWeights, conclusion=True)
    resumed, whole = run(tmp_path / "cut", *BREAKING, resume=True), run(tmp_path / "whole", *BREAKING)
    assert numbers(resumed)[2] == numbers(whole)[2]


class FailingRank(LearnerRank):
    """The call ``nth`` of ``method`` fails, or never returns."""

    method, nth, hangs = "values", 2, False

    def call(self, method, *arguments):
        if method == self.method:
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == self.nth:
                if self.hangs:
                    return asyncio.sleep(3600)
                raise RuntimeError("out of memory")
        return getattr(LearnerRank, method)(self, *arguments)

    def values(self, *arguments):
        return self.call("values", *arguments)

    def update_actor(self, *arguments):
        return self.call("update_actor", *arguments)


class FailingUnsavableRank(FailingRank):
    hangs = True

    def snapshot(self):
        return asyncio.sleep(3600)


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["gae", "running_mean"])
def test_a_learner_that_fails_before_the_update_gives_its_batch_back(tmp_path, advantage):
    options = [*BREAKING, f"algorithm.advantage={advantage}", "log.rollouts_every=1"]
    method = "values" if advantage == "gae" else "logprobs"

    class Failing(FailingRank):
        nth = 2 if advantage == "gae" else 4  # of logprobs: in turn a probe at each sync, and a sample at each step

        def logprobs(self, *arguments):
            return self.call("logprobs", *arguments)

    Failing.method = method
    with pytest.raises(RuntimeError, match="out of memory") as failure:
        run(tmp_path / "cut", *options, rank=Failing, conclusion=True)
    assert re.search(r"saved; .* continues after step 1\.$", failure.value.__notes__[0])
    resumed, whole = run(tmp_path / "cut", *options, resume=True), run(tmp_path / "whole", *options)
    assert numbers(resumed) == numbers(whole)


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 1])
def test_in_the_middle_of_an_update_nothing_is_saved_and_the_checkpoint_before_it_stays(tmp_path, every):
    class Failing(FailingRank):
        method = "update_actor"

    with pytest.raises(RuntimeError) as failure:
        run(tmp_path / "cut", *BREAKING, f"checkpoint.every={every}", rank=Failing, conclusion=True)
    assert "in the middle of the update of step 2" in failure.value.__notes__[0]
    newest, _ = Checkpoints(tmp_path / "cut", CheckpointConfig()).newest()
    assert (newest and newest.name) == ("step_000001" if every else None)
    resumed, whole = run(tmp_path / "cut", *BREAKING, resume=True), run(tmp_path / "whole", *BREAKING)
    assert numbers(resumed) == numbers(whole)


@pytest.mark.slow
def test_a_save_that_hangs_too_does_not_hide_why_the_run_ended(tmp_path):
    limits = ["cluster.watchdog_s=3", "rollout.timeout_s=2"]
    pattern = r"The learner has waited \d+ s for the critic's values\. .*stuck\.txt\. .* could not be saved within 3 s\.$"
    with pytest.raises(RunFailed, match=pattern):
        run(tmp_path, *BREAKING, *limits, rank=FailingUnsavableRank, conclusion=True)
    dump = (tmp_path / "logs" / "stuck.txt").read_text()
    assert "collect_0 has waited" in dump and "Controller.train_step" in dump and "LearnerGroup.values" in dump
    assert [row["step"] for row in run(tmp_path, *BREAKING, resume=True)] == [0, 1, 2], "from the start"


def test_the_documentation_has_the_table_of_the_code():
    page = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
    assert set(TREATMENT) == set(Kind) and as_markdown() in page.read_text()


def test_attempts_that_die_are_counted_from_the_last_new_checkpoint(tmp_path, capsys):
    checkpoints, config, starts = Checkpoints(tmp_path, CheckpointConfig(keep_last=10)), Config(), []
    config.checkpoint.max_failures = 2
    made = iter([1, None, 2, None, None])

    def attempt(checkpoint, restarts):
        starts.append((checkpoint and checkpoint.name, restarts))
        if (step := next(made)) is not None:
            save(checkpoints, step)
        raise WorkerDied("Learner rank 0 died.")

    with pytest.raises(RunFailed, match=r"^Learner rank 0 died\. No attempt is left of checkpoint\.max_failures=2\.$"):
        attempts.repeat(config, checkpoints, None, attempt)
    first, second = "step_000001", "step_000002"
    assert starts == [(None, 0), (first, 1), (first, 2), (second, 3), (second, 4)]
    assert re.findall(r"attempts left: (\d)", capsys.readouterr().out) == ["1", "0", "1", "0"]
