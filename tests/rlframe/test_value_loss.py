"""The critic's loss, its predictions, and explained variance from merged sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlframe import LossInputs, Metrics, ValueLoss, ValuePrediction, value_loss
from tests.support.loss_cases import Case, gradient, make_case


def inputs(case: Case, head: nn.Linear) -> LossInputs:
    return LossInputs(case.hidden, case.batch, value_head=lambda h: head(h).squeeze(-1))


def head_and_case(seed: int = 0, **settings) -> tuple[nn.Linear, Case]:
    torch.manual_seed(seed)
    return nn.Linear(8, 1).double(), make_case(seed, **settings)


def expected_values(case: Case, head: nn.Linear) -> Tensor:
    return head(case.hidden[case.rows() - 1]).squeeze(-1)


@pytest.mark.parametrize("clip_range", [None, 0.2])
def test_loss_and_gradient_equal_the_formula(clip_range: float | None) -> None:
    head, case = head_and_case(1)
    out = ValueLoss(vf_coef=0.7, clip_range=clip_range)(inputs(case, head))
    values = expected_values(case, head)
    returns, old = (torch.from_numpy(x).double()[case.rows()] for x in (case.batch.returns, case.batch.values))
    errors = (values - returns) ** 2
    if clip_range is not None:
        clipped = torch.minimum(torch.maximum(values, old - clip_range), old + clip_range)
        assert 0 < ((clipped - returns) ** 2 > errors).sum() < len(errors)
        errors = torch.maximum(errors, (clipped - returns) ** 2)
    want = 0.5 * 0.7 * errors.sum()
    torch.testing.assert_close(out.loss, want)
    torch.testing.assert_close(value_loss(values, returns, old, vf_coef=0.7, clip_range=clip_range), want)
    for got, expected in zip(
        gradient(out.loss, case.hidden, *head.parameters()), gradient(want, case.hidden, *head.parameters()), strict=True
    ):
        torch.testing.assert_close(got, expected)


def test_a_value_belongs_to_the_state_before_its_token() -> None:
    head, case = head_and_case(2)
    out = ValuePrediction()(inputs(case, head))
    hidden = head(case.hidden).squeeze(-1).detach().float()
    for t in case.rows().tolist():
        assert out.per_token["values"][t] == pytest.approx(float(hidden[t - 1]))
    off = torch.from_numpy(~case.batch.action_mask)
    assert (out.per_token["values"][off] == 0).all()
    torch.testing.assert_close(out.per_trajectory["bootstrap"], hidden[torch.from_numpy(case.batch.offsets[1:] - 1)])
    assert not out.per_token["values"].requires_grad and out.loss is None


def test_returns_of_zero_still_train_and_the_mask_alone_masks() -> None:
    head, case = head_and_case(3)
    case.batch.returns[:] = 0
    out = ValueLoss()(inputs(case, head))
    torch.testing.assert_close(out.loss, 0.5 * (expected_values(case, head) ** 2).sum())
    clean = out.loss
    off = ~case.batch.action_mask
    case.batch.returns[off] = np.nan
    case.hidden.data[[t for t in range(len(case.hidden)) if t + 1 not in case.rows().tolist()]] = np.nan
    assert torch.equal(ValueLoss()(inputs(case, head)).loss, clean)


def test_a_fresh_critic_explains_minus_one_of_fair_coins_in_the_mse_form() -> None:
    metrics = Metrics()
    metrics.explained_variance("ev", np.zeros(4), np.array([0, 1, 0, 1]))
    assert metrics.compute() == {"ev": 0.0, "ev_mse": -1.0}


def test_a_constant_bias_is_seen_by_one_form_only() -> None:
    """V = R + 1 on 0/1 returns: 1 and -3."""
    returns = np.array([0.0, 1, 1, 0])
    metrics = Metrics()
    metrics.explained_variance("ev", returns + 1, returns)
    assert metrics.compute() == {"ev": 1.0, "ev_mse": -3.0}


def test_constant_returns_give_nan() -> None:
    parts = []
    for _ in range(3):
        part = Metrics()
        part.explained_variance("ev", np.array([0.3, 0.5]), np.full(2, 0.1))
        parts.append(part)
    computed = Metrics.merge(parts).compute()
    assert math.isnan(computed["ev"]) and math.isnan(computed["ev_mse"])


def test_explained_variance_comes_from_all_tokens_not_from_averages_of_micro_batches() -> None:
    """Case 28; also with an offset of 1e6 in the targets, where sums of squares in fp64 would lose most digits."""
    rng = np.random.default_rng(4)
    for offset in (0.0, 1e6):
        returns = rng.normal(size=1000) + offset
        values = returns + rng.normal(size=1000) * 0.3
        parts = []
        for rows in np.array_split(rng.permutation(1000), 37):
            part = Metrics()
            part.explained_variance("ev", values[rows], returns[rows])
            parts.append(part)
        computed = Metrics.merge(parts).compute()
        assert computed["ev"] == pytest.approx(1 - np.var(returns - values) / np.var(returns), rel=1e-9)
        assert computed["ev_mse"] == pytest.approx(1 - np.mean((returns - values) ** 2) / np.var(returns), rel=1e-9)
        averaged = np.mean([part.compute()["ev"] for part in parts])
        assert abs(averaged - computed["ev"]) > 1e-3


def test_metrics_equal_their_definitions() -> None:
    head, case = head_and_case(5)
    metrics = ValueLoss(clip_range=0.2)(inputs(case, head)).metrics.compute()
    values = expected_values(case, head).detach().numpy()
    rows = case.rows().numpy()
    returns, old = case.batch.returns[rows].astype(float), case.batch.values[rows].astype(float)
    clipped = (np.clip(values, old - 0.2, old + 0.2) - returns) ** 2
    assert metrics["critic/value_loss"] == pytest.approx(0.5 * np.maximum(clipped, (values - returns) ** 2).mean())
    assert metrics["critic/value_mean"] == pytest.approx(values.mean())
    assert metrics["critic/return_mean"] == pytest.approx(returns.mean())
    assert metrics["critic/clip_fraction"] == pytest.approx((clipped > (values - returns) ** 2).mean())
    assert metrics["critic/explained_variance"] == pytest.approx(1 - np.var(returns - values) / np.var(returns))


def test_shapes_that_would_broadcast_are_refused() -> None:
    """Case 29: (B,) against (1, B) is B x B."""
    with pytest.raises(ValueError, match="differ in shape"):
        value_loss(torch.zeros(4), torch.zeros(1, 4))
    with pytest.raises(ValueError, match="old values"):
        value_loss(torch.zeros(4), torch.zeros(4), torch.zeros(4, 1), clip_range=0.2)
    head, case = head_and_case(6)
    with pytest.raises(ValueError, match="must return one value each"):
        ValueLoss()(LossInputs(case.hidden, case.batch, value_head=head))
