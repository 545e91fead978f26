"""Skip-observation GAE against the worked table and a plain loop, and the baselines."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlframe.advantages.gae as advantages
from rlframe import (
    AlgorithmConfig,
    Batch,
    ConfigError,
    Trajectory,
    adaptive_lambda,
    compute_advantages,
    group_advantages,
    make_estimator,
    skip_observation_gae,
)
from rlframe.advantages import Estimator
from rlframe.advantages.gae import GAE
from rlframe.advantages.running_mean import RunningMean


def trajectory(mask, rewards, finish: str = "stop", index: int = 0) -> Trajectory:
    n = len(mask)
    return Trajectory(
        tokens=np.zeros(n, np.int32),
        action_mask=np.array(mask, bool),
        logprobs=np.zeros(n),
        head_ids=np.zeros((n, 0)),
        head_logprobs=np.zeros((n, 0)),
        versions=np.zeros(n),
        rewards=np.array(rewards, np.float32),
        finish=finish,
        prompt_id=f"p{index}",
        index=index,
    )


def batch_of(*trajectories: Trajectory, values=None, bootstrap=None) -> Batch:
    batch = Batch.from_trajectories(trajectories)
    batch.values = None if values is None else np.array(values, np.float32)
    batch.bootstrap = None if bootstrap is None else np.array(bootstrap, np.float32)
    return batch


def plain_loop(batch: Batch, b: int, gamma: float, lam: float) -> np.ndarray:
    """One trajectory at a time, one token at a time, from the definition."""
    first, last = int(batch.offsets[b]), int(batch.offsets[b + 1])
    acting = [t for t in range(first, last) if batch.action_mask[t]]
    rewards = dict.fromkeys(acting, 0.0)
    for t in range(first, last):
        if batch.rewards[t] and acting:
            before = [a for a in acting if a <= t]
            rewards[before[-1] if before else acting[0]] += float(batch.rewards[t])
    advantages = np.zeros(last - first)
    following = float(batch.bootstrap[b]) if batch.finish[b] == "length" else 0.0
    advantage = 0.0
    for t in reversed(acting):
        delta = rewards[t] + gamma * following - float(batch.values[t])
        advantage = delta + gamma * lam * advantage
        advantages[t - first] = advantage
        following = float(batch.values[t])
    return advantages


# The worked table has an action in the first row; a prompt token (masked, value NaN) goes before it here.
MASK = [False, True, True, False, False, True, True]
VALUES = [np.nan, 0.1, 0.2, 9, -9, 0.3, 0.4]


@pytest.mark.parametrize(
    ("gamma", "lam", "reward", "finish", "advantages", "returns"),
    [
        (1.0, 0.95, 1.0, "stop", [0.799675, 0.7365, 0, 0, 0.67, 0.6], [0.899675, 0.9365, 0, 0, 0.97, 1.0]),
        (0.9, 0.8, 1.0, "stop", [0.385453, 0.42424, 0, 0, 0.492, 0.6], [0.485453, 0.62424, 0, 0, 0.792, 1.0]),
        (1.0, 0.95, 0.0, "length", [0.542462, 0.46575, 0, 0, 0.385, 0.3], [0.642462, 0.66575, 0, 0, 0.685, 0.7]),
    ],
)
def test_worked_table(gamma, lam, reward, finish, advantages, returns) -> None:
    batch = batch_of(trajectory(MASK, [0] * 6 + [reward], finish), values=VALUES, bootstrap=[0.7])
    got = skip_observation_gae(batch, gamma, lam)
    np.testing.assert_allclose(got[1:], advantages, atol=1e-6)
    compute_advantages(batch, GAE(AlgorithmConfig(gamma=gamma, lambda_policy=lam, lambda_critic=lam)))
    np.testing.assert_allclose(batch.advantages[1:], advantages, atol=1e-6)
    np.testing.assert_allclose(batch.returns[1:], returns, atol=1e-6)
    assert batch.advantages[0] == batch.returns[0] == 0


@st.composite
def batches(draw) -> Batch:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    trajectories = []
    for b in range(draw(st.integers(1, 5))):
        n = draw(st.integers(1, 30))
        mask = rng.random(n) < draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))
        mask[0] = False
        rewards = np.where(rng.random(n) < 0.3, rng.normal(size=n), 0)
        trajectories.append(trajectory(mask, rewards, draw(st.sampled_from(["stop", "length", "abort"])), b))
    batch = Batch.from_trajectories(trajectories)
    batch.values = np.where(batch.action_mask, rng.normal(size=batch.num_tokens), np.nan).astype(np.float32)
    batch.bootstrap = rng.normal(size=len(batch)).astype(np.float32)
    return batch


DECAYS = st.sampled_from([0.0, 1e-9, 0.1, 0.5, 0.8, 0.95, 0.99, 1.0])


@settings(max_examples=200, deadline=None)
@given(batches(), DECAYS, st.lists(DECAYS, min_size=5, max_size=5), st.sampled_from([1, 7, 40, 2**17]))
def test_equals_the_plain_loop(batch: Batch, gamma: float, lams: list[float], group: int) -> None:
    """Also where the batch is processed in several groups of trajectories."""
    lam = np.array(lams[: len(batch)])
    with mock.patch.object(advantages, "_GROUP_TOKENS", group):
        got = skip_observation_gae(batch, gamma, lam)
    for b in range(len(batch)):
        rows = slice(batch.offsets[b], batch.offsets[b + 1])
        np.testing.assert_allclose(got[rows], plain_loop(batch, b, gamma, lam[b]), rtol=1e-5, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(batches(), DECAYS, DECAYS, st.randoms(use_true_random=False))
def test_a_trajectory_does_not_see_its_neighbours(batch: Batch, gamma: float, lam: float, random) -> None:
    order = list(range(len(batch)))
    random.shuffle(order)
    want = np.concatenate([skip_observation_gae(batch.select([b]), gamma, lam) for b in order])
    np.testing.assert_array_equal(skip_observation_gae(batch.select(order), gamma, lam), want)


@settings(max_examples=50, deadline=None)
@given(batches(), DECAYS, DECAYS)
def test_what_lies_on_masked_rows_has_no_influence(batch: Batch, gamma: float, lam: float) -> None:
    """Case 21: a value of 100 at a masked row gave an advantage of 5.7."""
    want = skip_observation_gae(batch, gamma, lam)
    off = ~batch.action_mask
    for garbage in (100.0, np.inf, np.nan):
        batch.values[off] = garbage
        batch.logprobs[off] = garbage
        np.testing.assert_array_equal(skip_observation_gae(batch, gamma, lam), want)
    assert (want[off] == 0).all()


@settings(max_examples=50, deadline=None)
@given(batches())
def test_lambda_one_gives_monte_carlo_returns(batch: Batch) -> None:
    """With gamma and lambda 1 every return is the sum of what is still to come, the bootstrap included; no reward is lost."""
    if not batch.num_actions:
        return
    compute_advantages(batch, GAE(AlgorithmConfig(lambda_critic=1.0)))
    for b in range(len(batch)):
        rows = np.arange(batch.offsets[b], batch.offsets[b + 1])
        acting = rows[batch.action_mask[rows]]
        if len(acting):
            total = float(batch.rewards[rows].sum()) + (float(batch.bootstrap[b]) if batch.finish[b] == "length" else 0)
            assert batch.returns[acting[0]] == pytest.approx(total, abs=1e-4)


def test_long_trajectories_and_small_lambdas_neither_overflow_nor_lose_digits() -> None:
    rng = np.random.default_rng(0)
    mask = np.ones(20_000, bool)
    mask[0] = False
    batch = batch_of(trajectory(mask, np.arange(20_000) % 2_000 == 0), values=rng.normal(size=20_000))
    for gamma, lam in ((1.0, 0.3), (0.97, 0.95), (1.0, 1.0 - 1e-5)):
        got = skip_observation_gae(batch, gamma, lam)
        np.testing.assert_allclose(got, plain_loop(batch, 0, gamma, lam), rtol=1e-5, atol=1e-5)


def test_rewards_on_observations_go_to_the_action_before_them() -> None:
    mask = [False, False, True, True, False, False, True, False]
    batch = batch_of(trajectory(mask, [0, 5, 0, 0, 1, 2, 0, 4]), values=np.zeros(8))
    got = skip_observation_gae(batch, 1.0, 0.0)
    np.testing.assert_array_equal(got, [0, 0, 5, 3, 0, 0, 4, 0])


def test_only_finish_says_whether_an_episode_was_cut() -> None:
    """Case 22: not the padded width, not whether the trajectory is the longest, not the last token."""
    mask = [False, True, True]
    short, long = trajectory(mask, [0, 0, 0], "length"), trajectory([*mask, True, True], [0] * 5, "stop", 1)
    batch = batch_of(short, long, values=np.zeros(8), bootstrap=[0.7, np.nan])
    got = skip_observation_gae(batch, 1.0, 1.0)
    np.testing.assert_allclose(got, [0, 0.7, 0.7, 0, 0, 0, 0, 0], atol=1e-7)


def test_a_cut_episode_needs_its_bootstrap() -> None:
    cut = trajectory([False, True], [0, 0], "length")
    with pytest.raises(ValueError, match=r"prompt 'p0'.*bootstrap"):
        skip_observation_gae(batch_of(cut, values=[0, 0]), 1.0, 1.0)
    with pytest.raises(ValueError, match=r"prompt 'p0'.*bootstrap is not finite"):
        skip_observation_gae(batch_of(cut, values=[0, 0], bootstrap=[np.nan]), 1.0, 1.0)


def test_adaptive_lambda() -> None:
    got = adaptive_lambda(np.array([0, 1, 2, 10, 4096]), 1.5)
    np.testing.assert_allclose(got, [0, 1 - 1 / 1.5, 1 - 1 / 3, 1 - 1 / 15, 1 - 1 / 6144])
    assert adaptive_lambda(np.array([1]), 0.5)[0] == 0


def test_the_policy_uses_the_adaptive_lambda_of_its_own_length_and_the_critic_its_own() -> None:
    rng = np.random.default_rng(1)
    masks = [[False, *[True] * n] for n in (1, 4, 9)]
    batch = batch_of(
        *(trajectory(m, [0] * (len(m) - 1) + [1], index=i) for i, m in enumerate(masks)), values=rng.normal(size=17)
    )
    compute_advantages(batch, GAE(AlgorithmConfig(lambda_alpha=1.5, lambda_critic=1.0)))
    for b, n in enumerate((1, 4, 9)):
        rows = slice(batch.offsets[b], batch.offsets[b + 1])
        np.testing.assert_allclose(batch.advantages[rows], plain_loop(batch, b, 1.0, 1 - 1 / (1.5 * n)), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(batch.returns[rows][1:], 1.0, atol=1e-6)


def test_group_advantages() -> None:
    rewards, groups = np.array([1.0, 0, 0, 5, 2, 2]), np.array([7, 3, 7, 9, 3, 3])
    np.testing.assert_allclose(group_advantages(rewards, groups), [0.5, -4 / 3, -0.5, 0, 2 / 3, 2 / 3])
    spread = np.std([0, 2, 2], ddof=1)
    normalised = [0.5 / math.sqrt(0.5), -4 / 3 / spread, -0.5 / math.sqrt(0.5), 0, 2 / 3 / spread, 2 / 3 / spread]
    np.testing.assert_allclose(group_advantages(rewards, groups, normalize=True), normalised)
    np.testing.assert_array_equal(group_advantages(np.ones(4), np.zeros(4), normalize=True), 0)


def running_mean(decay: float) -> RunningMean:
    return RunningMean(AlgorithmConfig(running_mean_decay=decay))


def test_running_mean_knows_only_the_past_and_survives_a_checkpoint() -> None:
    mean = running_mean(0.5)
    assert mean.baseline(np.array([1.0, 3.0])) == 2.0
    assert mean.baseline(np.array([100.0])) == 2.0
    # Weights 0.25 and 0.5 of the two batches so far.
    restored = running_mean(0.5)
    restored.load_state_dict(mean.state_dict())
    for m in (mean, restored):
        assert m.baseline(np.array([0.0])) == pytest.approx((0.25 * 2 + 0.5 * 100) / 0.75)


def test_a_resume_with_another_decay_keeps_the_past_and_weighs_it_anew() -> None:
    """Batch means 2, then 100 under decay 0.5; afterwards 0 and 10 under 0.9."""
    mean = running_mean(0.5)
    for reward in (2.0, 100.0):
        mean.baseline(np.array([reward]))
    resumed = running_mean(0.9)
    resumed.load_state_dict({"decay": 0.5, **mean.state_dict()})  # older checkpoints hold the setting, too
    assert resumed.decay == 0.9
    resumed.baseline(np.array([0.0]))
    weights = np.array([0.25, 0.5, 0.0]) * 0.9 + np.array([0, 0, 0.1])
    assert resumed.baseline(np.array([10.0])) == pytest.approx(weights @ [2, 100, 0] / weights.sum())


@pytest.mark.parametrize(
    ("algorithm", "baselines"),
    [
        (AlgorithmConfig(advantage="none"), [0, 0, 0]),
        (AlgorithmConfig(advantage="group"), [2.0, 2.0, 7.0]),
        (AlgorithmConfig(advantage="running_mean"), [11 / 3] * 3),
    ],
)
def test_without_a_critic_every_action_token_gets_the_reward_minus_a_baseline(algorithm, baselines) -> None:
    mask = [False, True, False, True]
    batch = batch_of(trajectory(mask, [0, 1, 0, 0]), trajectory(mask, [0, 0, 3, 0]), trajectory(mask, [0, 0, 0, 7], index=1))
    compute_advantages(batch, make_estimator(algorithm))
    for b, reward in enumerate((1, 3, 7)):
        rows = slice(batch.offsets[b], batch.offsets[b + 1])
        np.testing.assert_allclose(batch.advantages[rows], np.array(mask) * (reward - baselines[b]), rtol=1e-6)
        np.testing.assert_allclose(batch.returns[rows], np.array(mask) * reward)


def test_what_is_missing_is_said() -> None:
    batch = batch_of(trajectory([False, True], [0, 1]))
    with pytest.raises(ValueError, match="no values"):
        compute_advantages(batch, GAE(AlgorithmConfig()))
    with pytest.raises(ConfigError, match="not known; choose one of gae, running_mean, group, none, or module:Class"):
        make_estimator(AlgorithmConfig(advantage="ppo"))
    batch.values = np.array([0, np.nan], np.float32)
    with pytest.raises(ValueError, match=r"prompt 'p0'.*token 1: values is not finite"):
        compute_advantages(batch, GAE(AlgorithmConfig()))


DOC = Path(__file__).parents[2] / "docs" / "algorithms.md"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory of a user, with modules of theirs; its modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_documented_estimator_of_ones_own(folder) -> None:
    """Rewards 1, 3, 5, then 10, 20, 30: the median of the first batch, then of that batch alone, and so after a resume."""
    (source,) = re.findall(r"```python\n(# my_advantages.py\n.*?)```", DOC.read_text(), re.DOTALL)
    (folder / "my_advantages.py").write_text(source)
    algorithm = AlgorithmConfig(advantage="my_advantages:PastMedian", advantage_args={"batches": 2})
    estimator, mask = make_estimator(algorithm), [False, True]

    def advantages(estimator, rewards) -> list[float]:
        batch = batch_of(*(trajectory(mask, [0, reward]) for reward in rewards))
        compute_advantages(batch, estimator)
        np.testing.assert_array_equal(batch.returns[1::2], rewards)
        return batch.advantages[1::2].tolist()

    assert advantages(estimator, [1, 3, 5]) == [-2, 0, 2]
    assert advantages(estimator, [10, 20, 30]) == [7, 17, 27]
    resumed = make_estimator(algorithm)
    resumed.load_state_dict(json.loads(json.dumps(estimator.state_dict())))
    for each in (estimator, resumed):
        assert advantages(each, [0, 0]) == [-7.5, -7.5], "the median of 1, 3, 5, 10, 20, 30"


OWN = """
from rlframe.advantages import Estimator

class Fits(Estimator):
    def __init__(self, algorithm, scale=1.0): ...
    def __call__(self, batch): return batch.rewards, batch.rewards

class Alone:
    def __init__(self, algorithm): ...
    def __call__(self, batch): ...

class Unsure(Fits):
    needs_critic = "yes"

class Lists(Fits):
    settings = ("gama",)

class Kept(Fits):
    def state_dict(self): return {"past": {1.0, 2.0}}

def maker(algorithm): return Fits
number = 3
"""


@pytest.mark.parametrize(
    ("path", "args", "sentence"),
    [
        ("absent:Fits", {}, r"advantage=absent:Fits cannot be imported: ModuleNotFoundError: No module named 'absent'\."),
        ("broken:Fits", {}, r"advantage=broken:Fits cannot be imported: ZeroDivisionError: division by zero\."),
        ("own:Fitz", {}, r"advantage=own:Fitz names nothing: .*own\.py has no 'Fitz'\."),
        ("own:", {}, r"advantage=own: names nothing"),
        ("own:number", {}, r"advantage=own:number is not a class"),
        (
            "own:Fits",
            {"skale": 2},
            r"advantage_args=\{'skale': 2\}: got an unexpected keyword argument 'skale'",
        ),
        ("own:Alone", {}, r"not an advantage estimator: it has no method check; subclass rlframe\.advantages\.Estimator\."),
        ("own:Unsure", {}, r"its needs_critic is 'yes' instead of True or False"),
        ("own:Lists", {}, r"its settings are \('gama',\) instead of a tuple of fields of algorithm"),
        ("own:Kept", {}, r"its state_dict cannot be written as JSON \(Object of type set"),
        ("own:maker", {}, r"it is a class instead of an object"),
        ("gae", {"decay": 0.5}, r"advantage=gae cannot be built with algorithm\.advantage_args=\{'decay': 0\.5\}"),
    ],
)
def test_what_is_no_estimator_is_refused_in_one_sentence(folder, path, args, sentence) -> None:
    (folder / "own.py").write_text(OWN)
    (folder / "broken.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match=sentence) as refusal:
        make_estimator(AlgorithmConfig(advantage=path, advantage_args=args))
    assert "\n" not in str(refusal.value)
    make_estimator(AlgorithmConfig(advantage="own:Fits", advantage_args={"scale": 2.0}))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [((np.zeros(3), np.zeros(2)), "gave advantages of shape"), ((np.full(2, np.nan), np.zeros(2)), "advantages is not finite")],
)
def test_what_an_estimator_gives_is_checked(given, sentence) -> None:
    class Wrong(Estimator):
        def __call__(self, batch):
            return given

    with pytest.raises(ValueError, match=sentence):
        compute_advantages(batch_of(trajectory([False, True], [0, 1])), Wrong())


def test_what_an_estimator_gives_off_the_mask_is_dropped() -> None:
    class Everywhere(Estimator):
        def __call__(self, batch):
            return np.full(3, 2.0), np.array([np.nan, 1.0, 5.0])

    batch = batch_of(trajectory([False, True, False], [0, 1, 0]))
    compute_advantages(batch, Everywhere())
    assert batch.advantages.tolist() == [0, 2, 0] and batch.returns.tolist() == [0, 1, 0]
    assert batch.advantages.dtype == batch.returns.dtype == np.float32
