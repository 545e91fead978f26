"""One episode on the real reference engine: what is masked, where rewards lie, which budget ends it."""

import asyncio
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from engine_support import MAX_MODEL_LEN, VOCABULARY, alignment_error, dense_logprobs, perturbed, save, tiny_model, update_of
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_support import OBSERVATION, STOPS, Scripted, config_of, prompts_of

from workers.environments.base import FatalRewardError, StepResult
from workers.rollout.engine import SamplingParams
from workers.rollout.episode import run_episode, sample_turn
from workers.rollout.torch_engine import TorchEngine

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
    with pytest.raises(ValueError, match=r"'p0'.*4 tokens.*max_model_len=4"):
        run(path, prompts_of(1)[0], max_model_len=4)


def test_an_aborted_turn_goes_on_within_its_budget_and_its_arrays_keep_step(path):
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


class Answers(Scripted):
    """One turn that is answered with a given step."""

    def __init__(self, **step) -> None:
        self.given = {"reward": 1.0, "done": False, "observation": OBSERVATION, **step}
        self.stop_token_ids = STOPS

    def episode(self, prompt):
        return self

    async def step(self, action, finish):
        return StepResult(**self.given)


@pytest.mark.parametrize(
    ("step", "named"),
    [
        ({"observation": np.array([5, VOCABULARY])}, f"the token {VOCABULARY}, but .* {VOCABULARY} entries"),
        ({"observation": np.array([-1])}, "the token -1"),
        ({"observation": np.array([2**40])}, f"the token {2**40}"),
        ({"observation": np.array([1.5])}, "float64 values"),
        ({"observation": [[1, 2]]}, r"shape \(1, 2\)"),
        ({"reward": 1e39}, r"reward 1e\+39, which is not a finite number"),
        ({"reward": None}, "reward None"),
        ({"reward": "1"}, "reward '1'"),
        ({"reward": float("nan")}, "reward nan"),
        ({"reward": np.inf, "done": True}, "reward inf"),
    ],
)
def test_what_no_trajectory_can_hold_ends_the_run_and_not_the_engine(path, step, named):
    engine = TorchEngine(path, max_model_len=MAX_MODEL_LEN)
    with pytest.raises(FatalRewardError, match=named):
        asyncio.run(run_episode(engine, Answers(**step), prompts_of(1)[0], PARAMS, max_model_len=64, vocab_size=VOCABULARY))


@pytest.mark.parametrize("step", [{"observation": []}, {"observation": [1, 63]}, {"reward": np.float32(2)}, {"reward": True}])
def test_other_kinds_of_numbers_and_lists_are_taken(path, step):
    engine = TorchEngine(path, max_model_len=MAX_MODEL_LEN)
    given = Answers(**step)
    trajectory = asyncio.run(run_episode(engine, given, prompts_of(1)[0], PARAMS, max_model_len=64, vocab_size=VOCABULARY))
    assert trajectory.reward == 4 * float(given.given["reward"]) and len(turns_of(trajectory)) in (1, 4)
