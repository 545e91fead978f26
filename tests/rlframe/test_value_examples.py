"""The examples of learned values, shortened: closed forms where there are any, the sign of the effect elsewhere."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from examples.values import easy, flip, xor
from examples.values.common import ARMS, Row


def test_a_fresh_critic_explains_minus_one_of_an_even_half_and_nothing_of_the_variance() -> None:
    """V = 0 on 0/1 returns, half of them 1: 1 - (1/2) / (1/4)."""
    rows = list(easy.run(seed=0, steps=0))
    assert [row.arm for row in rows] == list(ARMS)
    for row in rows:
        assert row.metrics["held_out/explained_variance_mse"] == pytest.approx(-1, abs=1e-9)
        assert row.metrics["held_out/explained_variance"] == pytest.approx(0, abs=1e-9)


def test_the_true_probability_is_the_mean_over_what_is_not_shown_yet() -> None:
    for plus, x in itertools.product((False, True), range(xor.DIGITS)):
        late = [0.9 if plus != (x > y) else 0.1 for y in range(xor.DIGITS)]
        assert [xor.probability(plus, x, y) for y in range(xor.DIGITS)] == pytest.approx(late)
        assert xor.probability(plus, x, None) == pytest.approx(np.mean(late))


def test_texts_carry_the_truth_where_the_policy_acts_and_no_held_out_combination_is_trained_on() -> None:
    rng = np.random.default_rng(0)
    training, unseen = xor.split(rng)
    assert (len(training), len(unseen)) == (150, 50) and not set(training) & set(unseen)
    batch, truth = xor.texts(rng, training, 2000)
    assert len(truth) == batch.num_tokens and not truth[~batch.action_mask].any()
    paid = batch.returns[batch.action_mask].reshape(2000, -1)
    known = truth[batch.action_mask].reshape(2000, -1)
    # 2000 draws of variance 0.09: four standard errors.
    assert abs(paid[:, -1].mean() - known[:, -1].mean()) < 4 * 0.3 / 2000**0.5


@pytest.mark.slow
@pytest.mark.parametrize("arm", ARMS)
def test_a_critic_learns_the_easy_value(arm: str) -> None:
    assert list(easy.run(seed=0, steps=40, arms=[arm]))[-1].metrics["held_out/explained_variance_mse"] > 0.5


@pytest.mark.slow
def test_a_full_adapter_finds_some_of_the_xor_on_combinations_it_has_not_seen() -> None:
    rows = list(xor.run(seed=0, steps=160, every=160, arms=["full adapter"]))
    assert rows[-1].metrics[xor.METRIC] > 0


@pytest.mark.slow
def test_a_flipped_reward_turns_the_gap_around() -> None:
    rows = [row.metrics for row in flip.run(seed=0, data="fixed", arm="critic", rounds=16, flip=16)]
    assert rows[0]["critic_ev_mse"] == pytest.approx(-1, abs=0.3), "held-out texts are about half even, half odd"
    assert rows[15]["gap"] > 0 and rows[15]["critic_ev_mse"] > 0
    assert rows[16]["gap"] < 0, "the same policy, the other texts rewarded"
    assert rows[16]["critic_ev_mse"] < -1, "it promises what is no longer paid"


def test_rounds_are_counted_from_the_flip() -> None:
    rows = [Row("a", seed, step, {"gap": step - 5.0}) for seed in (0, 1) for step in range(10)]
    rows = [replace(row, metrics={"gap": -1.0}) if row.seed == 1 else row for row in rows]
    assert flip.rounds_until(rows, "a", "gap", 0, flip=4) == [2, None]
