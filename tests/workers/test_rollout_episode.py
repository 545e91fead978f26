"""One episode on the real reference engine: what is masked, where rewards lie, which budget ends it."""

import asyncio
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engines import MAX_MODEL_LEN, alignment_error, dense_logprobs, perturbed, save, tiny_model, update_of
from tests.support.rollouts import OBSERVATION, STOPS, Scripted, config_of, prompts_of
from workers.engines.protocol import SamplingParams
from workers.engines.torch.engine import TorchEngine
from workers.environments.base import FatalRewardError, RewardError, StepResult
from workers.faults import EpisodeFailed, Fault, Kind
from workers.rollout.episode import run_episode, sample_turn

BASE = tiny_model()
PARAMS = SamplingParams(max_new_tokens=6, temperature=0.7, logprobs=5, seed=3)
ENVIRONMENT = Scripted(config_of().task, None, seed=0, eval_size=0)
STOPLESS = Scripted(config_of(stop_token_ids=()).task, None, seed=0, eval_size=0)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(BASE, tmp_path_factory.mktemp("model"))


def run(path, prompt, params=PARAMS, max_model_len=MAX_MODEL_LEN, environment=ENVIRONMENT):
    engine = TorchEngine(path, max_model_len=max_model_len)
    return asyncio.run(run_episode(engine, environment, prompt, params, max_model_len=max_model_len))


def turns_of(trajectory):
    """(first, last) action row of every turn."""
    edges = np.diff(np.concatenate([[0], trajectory.action_mask.astype(int), [0]]))
    return list(zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1, strict=True))


def test_every_row_describes_its_own_token(path):
    trajectory = run(path, prompts_of(1)[0])
    rows = dense_logprobs(BASE, trajectory.tokens, 0.7)
    where = np.flatnonzero(trajectory.action_mask)
    assert np.abs(rows[where - 1, trajectory.tokens[where]] - trajectory.logprobs[where]).max() < 1e-4
    heads = np.take_along_axis(rows[where - 1], trajectory.head_ids[where].astype(np.int64), 1)
    assert np.abs(heads - trajectory.head_logprobs[where]).max() < 1e-4


def test_turns_and_observations_alternate_and_each_reward_lies_on_the_turn_s_last_token(path):
    prompt = prompts_of(1)[0]
    trajectory = run(path, prompt)
    turns = turns_of(trajectory)
    assert len(turns) == 3 and trajectory.metadata["turns"] == 3
    assert trajectory.tokens[: len(prompt.tokens)].tolist() == prompt.tokens.tolist()
    for (_, last), (first, _) in pairwise(turns):
        assert trajectory.tokens[last + 1 : first].tolist() == OBSERVATION.tolist()
    expected = np.zeros(len(trajectory))
    expected[[last for _, last in turns]] = [1, 2, 3]
    assert (trajectory.rewards == expected).all()
    assert turns[-1][1] == len(trajectory) - 1


def test_observations_carry_no_numbers_of_the_sampler(path):
    trajectory = run(path, prompts_of(1)[0])
    observed = ~trajectory.action_mask
    assert (trajectory.versions[observed] == -1).all() and (trajectory.versions[~observed] == 0).all()
    assert (trajectory.logprobs[observed] == 0).all()
    assert np.isneginf(trajectory.head_logprobs[observed]).all()


def test_the_end_is_told_by_who_ended_it(path):
    ended = run(path, prompts_of(1, turns=1)[0], replace(PARAMS, max_new_tokens=200))
    assert ended.finish == "stop" and ended.metadata["finish_1"] == "stop"
    assert ended.tokens[-1] in STOPS
    assert run(path, prompts_of(1, turns=1)[0], environment=STOPLESS).finish == "length"
    assert run(path, prompts_of(1, turns=99)[0]).finish == "length"


def test_the_whole_context_is_never_exceeded(path):
    prompt = prompts_of(1, turns=4)[0]
    full = run(path, prompt)
    for limit in range(len(prompt.tokens) + 1, len(full)):
        cut = run(path, prompt, max_model_len=limit)
        assert len(cut) <= limit and cut.finish == "length"
        assert cut.action_mask[-1], "an observation that no turn follows is not part of the trajectory"
        assert (cut.tokens == full.tokens[: len(cut)]).all()


def test_a_prompt_that_leaves_no_room_is_an_error_with_both_numbers(path):
    with pytest.raises(EpisodeFailed, match=r"'p0'.*4 tokens.*max_model_len=4"):
        run(path, prompts_of(1)[0], max_model_len=4)


def test_an_aborted_turn_continues_within_its_budget_and_its_arrays_keep_step(path):
    engine, prompt, new = TorchEngine(path, max_model_len=MAX_MODEL_LEN), prompts_of(1)[0].tokens, perturbed(BASE, 1)
    params = SamplingParams(max_new_tokens=60, logprobs=4, seed=5)

    async def abort_twice():
        turn = asyncio.create_task(sample_turn(engine, prompt, params))
        for version in (1, 2):
            await engine.generate(prompt, SamplingParams(max_new_tokens=10))
            await engine.pause("abort")
            await engine.load_weights(update_of(new, version))
            await engine.resume()
        return await turn

    completion = asyncio.run(abort_twice())
    assert completion.finish == "length" and len(completion.ids) == 60
    assert completion.head_ids.shape == (60, 4) and len(completion.versions) == len(completion.logprobs) == 60
    assert set(completion.versions.tolist()) == {0, 1, 2}
    first = int((completion.versions == 0).sum())
    later = replace(
        completion, **{n: getattr(completion, n)[first:] for n in ("ids", "logprobs", "head_ids", "head_logprobs", "versions")}
    )
    assert alignment_error(new, np.concatenate([prompt, completion.ids[:first]]), later, 1.0) < 1e-4


@settings(max_examples=15, deadline=None)
@given(aborts=st.lists(st.integers(1, 12), max_size=4), budget=st.integers(1, 30), stops=st.booleans())
def test_however_often_a_turn_is_aborted_its_rows_keep_step_and_its_budget_holds(path, aborts, budget, stops):
    """``aborts``: tokens sampled between one abort and the next, as far as the budget allows."""
    engine, prompt = TorchEngine(path, max_model_len=MAX_MODEL_LEN), prompts_of(1)[0].tokens
    params = SamplingParams(max_new_tokens=budget, logprobs=3, seed=7, stop_token_ids=STOPS if stops else ())
    before = replace(params)

    async def turn():
        running = asyncio.create_task(sample_turn(engine, prompt, params))
        for version, tokens in enumerate(aborts, 1):
            await engine.generate(prompt, SamplingParams(max_new_tokens=tokens))
            await engine.pause("abort")
            await engine.load_weights(update_of(BASE, version))
            await engine.resume()
        return await running

    completion = asyncio.run(turn())
    n = len(completion.ids)
    rows = {len(getattr(completion, name)) for name in ("logprobs", "head_ids", "head_logprobs", "versions")}
    assert rows == {n} and 1 <= n <= budget
    stopped = stops and int(completion.ids[-1]) in STOPS
    assert completion.finish == ("stop" if stopped else "length") and (stopped or n == budget)
    assert (np.diff(completion.versions) >= 0).all()
    assert alignment_error(BASE, prompt, completion, 1.0) < 1e-4
    assert params == before


class FixedAnswer(Scripted):
    """Answers its first turn with ``answer``."""

    def __init__(self, answer):
        super().__init__(config_of().task, None, seed=0, eval_size=0)
        self.answer = answer

    def episode(self, prompt):
        episode = super().episode(prompt)
        episode.step = self.step
        return episode

    async def step(self, action, finish):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def fault_of(path, environment, prompt=None, engine=None, **options):
    engine = engine or TorchEngine(path, max_model_len=MAX_MODEL_LEN)
    episode = run_episode(
        engine, environment, prompt or prompts_of(1)[0], PARAMS, max_model_len=MAX_MODEL_LEN, vocabulary=64, **options
    )
    with pytest.raises(EpisodeFailed) as failure:
        asyncio.run(episode)
    return failure.value.fault


def test_who_is_to_blame_is_known_by_where_it_happened(path):
    """Also of a TimeoutError that is not ours, and of words like time and reward in a message."""

    class Failing(TorchEngine):
        error = None

        async def generate(self, tokens, params):
            raise self.error

    def of_engine(error):
        engine = Failing(path)
        engine.error = error
        return fault_of(path, ENVIRONMENT, engine=engine)

    assert fault_of(path, FixedAnswer(TimeoutError("x"))) == Fault(Kind.ENVIRONMENT, "TimeoutError: x")
    assert fault_of(path, FixedAnswer(ValueError("no reward in time"))) == Fault(
        Kind.ENVIRONMENT, "ValueError: no reward in time"
    )
    assert fault_of(path, FixedAnswer(RewardError("timed out"))) == Fault(Kind.REWARD, "timed out")
    assert fault_of(path, FixedAnswer(FatalRewardError("gone"))) == Fault(Kind.REWARD, "gone", fatal=True)
    assert fault_of(path, FixedAnswer("no step")).kind is Kind.ENVIRONMENT
    assert of_engine(RuntimeError("time")) == Fault(Kind.ENGINE, "RuntimeError: time")
    assert of_engine(ValueError("too long")) == Fault(Kind.REJECTED, "ValueError: too long")


@pytest.mark.parametrize("token", [64, -1])
def test_a_token_that_is_not_in_the_vocabulary_is_rejected_before_an_engine_sees_it(path, token):
    prompt = prompts_of(1)[0]
    prompt.tokens[1] = token
    fault = fault_of(path, ENVIRONMENT, prompt)
    assert fault == Fault(Kind.REJECTED, f"prompt 'p0' has the token {token}, but the ids of the model's vocabulary end at 63")
    observed = StepResult(0.0, False, np.array([5, token], np.int32))
    assert fault_of(path, FixedAnswer(StepResult(0.0, False, np.array([2**40 + 5])))).kind is Kind.REJECTED
    assert fault_of(path, FixedAnswer(StepResult(0.0, False, np.array([1.5])))).kind is Kind.ENVIRONMENT
    assert fault_of(path, FixedAnswer(observed)).kind is Kind.REJECTED


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e39])
def test_a_reward_that_is_no_float32_is_a_failed_reward_under_the_policy_for_these(path, reward):
    environment = FixedAnswer(StepResult(reward, True))
    fatal = fault_of(path, environment)
    assert fatal.kind is Kind.REWARD and fatal.fatal and str(reward) in fatal.reason
    dropped = fault_of(path, environment, on_reward_failure="drop")
    assert dropped.kind is Kind.REWARD and not dropped.fatal
    engine = TorchEngine(path, max_model_len=MAX_MODEL_LEN)
    zero = run_episode(engine, environment, prompts_of(1)[0], PARAMS, max_model_len=MAX_MODEL_LEN, on_reward_failure="zero")
    assert asyncio.run(zero).reward == 0
