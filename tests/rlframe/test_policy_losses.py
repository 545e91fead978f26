"""DIS, PPO-clip and CISPO against their papers' formulas, differentiated by autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rlframe import AlgorithmConfig, ConfigError, PolicyLoss
from rlframe.losses.registry import API_LOSSES, make_policy_loss
from tests.support.loss_cases import dense_logprobs, gradient, make_case, sampled


def dis(log_p: Tensor, log_q: Tensor, a: Tensor) -> Tensor:
    r = (log_p - log_q).exp().detach()
    return -torch.where((r > 1 - 0.3) & (r < 1 + 0.6), r, 0.0) * a * log_p


def ppo_clip(log_p: Tensor, log_q: Tensor, a: Tensor) -> Tensor:
    r = (log_p - log_q).exp()
    return -torch.minimum(r * a, r.clamp(0.8, 1.3) * a)


def dual_clip(log_p: Tensor, log_q: Tensor, a: Tensor) -> Tensor:
    objective = -ppo_clip(log_p, log_q, a)
    return -torch.where(a < 0, torch.maximum(objective, 1.6 * a), objective)


def cispo(log_p: Tensor, log_q: Tensor, a: Tensor) -> Tensor:
    return -(log_p - log_q).exp().clamp(0.8, 1.3).detach() * a * log_p


CASES = {
    "dis": (AlgorithmConfig(policy_loss="dis", clip_low=0.3, clip_high=0.6), dis),
    "ppo_clip": (AlgorithmConfig(policy_loss="ppo_clip", clip_low=0.2, clip_high=0.3), ppo_clip),
    "dual_clip": (AlgorithmConfig(policy_loss="ppo_clip", clip_low=0.2, clip_high=0.3, clip_dual=1.6), dual_clip),
    "cispo": (AlgorithmConfig(policy_loss="cispo", clip_low=0.2, clip_high=0.3), cispo),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_the_formula(name: str) -> None:
    algorithm, formula = CASES[name]
    case = make_case(1, lengths=(30, 20), noise=0.7)
    case.weight.requires_grad_()
    out = PolicyLoss(algorithm)(case.inputs())
    log_p, log_q, advantages = sampled(case, dense_logprobs(case))
    expected = formula(log_p, log_q, advantages).sum()
    torch.testing.assert_close(out.loss, expected, rtol=1e-6, atol=1e-7)
    got, want = (gradient(loss, case.hidden, case.weight) for loss in (out.loss, expected))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-6, atol=1e-7)
    assert out.metrics.compute()["actor/pg_loss"] == pytest.approx(float(expected.detach()) / len(log_p), rel=1e-6)


def one_token(name: str, log_p: float, log_q: float, advantage: float):
    algorithm, _ = CASES[name]
    tensors = (torch.tensor([x], dtype=torch.float64) for x in (log_p, log_q, advantage))
    return make_policy_loss(algorithm)(*tensors)


def clamped(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p - log_q).clamp(-20, 20).exp()


def clamped_ppo(log_p: Tensor, log_q: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    r = clamped(log_p, log_q)
    return -torch.minimum(r * a, r.clamp(low, high) * a)


FAR = {
    "ppo_clip": (AlgorithmConfig(policy_loss="ppo_clip"), lambda p, q, a: clamped_ppo(p, q, a, 0.8, 1.2)),
    "cispo": (
        AlgorithmConfig(policy_loss="cispo"),
        lambda p, q, a: -clamped(p, q).clamp(0.8, 1.2).detach() * a * p,
    ),
    "dis": (
        AlgorithmConfig(policy_loss="dis"),
        lambda p, q, a: -torch.where((clamped(p, q) - 1).abs() < 0.2, clamped(p, q), 0.0).detach() * a * p,
    ),
    "reinforce": (AlgorithmConfig(), lambda p, q, a: -a * p),
    "tis": (AlgorithmConfig(rollout_is="token"), lambda p, q, a: -clamped(p, q).clamp(max=2).detach() * a * p),
    "target importance_sampling": (API_LOSSES["importance_sampling"].make(), lambda p, q, a: -clamped(p, q) * a),
    "target ppo": (API_LOSSES["ppo"].make(**API_LOSSES["ppo"].config), lambda p, q, a: clamped_ppo(p, q, a, 0.8, 1.2)),
}
"""What builds a loss, and its formula with the log-ratio clamped to +-20."""


@pytest.mark.parametrize("name", FAR)
def test_the_gradient_beyond_the_clamp_of_the_log_ratio_is_that_of_the_loss(name: str) -> None:
    """Where the clamped ratio is a constant the loss is flat, so nothing may pull."""
    loss, formula = FAR[name]
    log_r = torch.tensor([-40.0, -25.0, -19.0, -0.1, 0.0, 0.1, 19.0, 25.0, 40.0], dtype=torch.float64).repeat(2)
    a = torch.tensor([1.5, -0.5], dtype=torch.float64).repeat_interleave(9)
    log_q = torch.full_like(log_r, -41.0)
    log_p = (log_q + log_r).requires_grad_()
    expected = formula(log_p, log_q, a)
    loss = make_policy_loss(loss) if isinstance(loss, AlgorithmConfig) else loss
    got = loss(log_p.detach(), log_q, a)
    torch.testing.assert_close(got.loss, expected.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(got.slope, gradient(expected.sum(), log_p)[0], rtol=1e-13, atol=0)


def test_dis_weight_is_detached() -> None:
    """At log p = -3, log q = -3.2 the derivative is -1.22; a live ratio would give +2.44."""
    assert float(one_token("dis", -3.0, -3.2, 1.0).slope) == pytest.approx(-1.2214, abs=1e-4)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_dis_band_is_open_and_blind_to_the_sign_of_the_advantage(sign: float) -> None:
    algorithm = AlgorithmConfig(policy_loss="dis", clip_low=0.5, clip_high=1.0)
    r = torch.tensor([0.5, 0.500001, 1.0, 1.999999, 2.0], dtype=torch.float64)
    token = make_policy_loss(algorithm)(r.log(), torch.zeros(5).double(), torch.full((5,), sign).double())
    assert (token.slope == 0).tolist() == [True, False, False, False, True]
    assert token.clipped.tolist() == [True, False, False, False, True]


@pytest.mark.parametrize("name", CASES)
def test_clip_fraction_is_measured_before_clipping(name: str) -> None:
    """Case 27: looking at ratios that were already clipped always gives 0."""
    algorithm, _ = CASES[name]
    case = make_case(2, lengths=(40,), noise=0.7)
    metrics = PolicyLoss(algorithm)(case.inputs()).metrics.compute()
    log_p, log_q, a = (x.detach().numpy() for x in sampled(case, dense_logprobs(case)))
    r = np.exp(log_p - log_q)
    outside = {
        "dis": (r <= 0.7) | (r >= 1.6),
        "ppo_clip": ((a > 0) & (r > 1.3)) | ((a < 0) & (r < 0.8)),
        "dual_clip": ((a > 0) & (r > 1.3)) | ((a < 0) & ((r < 0.8) | (r > 1.6))),
        "cispo": (r < 0.8) | (r > 1.3),
    }[name]
    assert metrics["actor/clip_fraction"] == pytest.approx(outside.mean()) and 0 < outside.mean() < 1


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        (AlgorithmConfig(policy_loss="dis", rollout_is="token"), "apply the ratio twice"),
        (AlgorithmConfig(policy_loss="ppo_clip", score_centering=True), "score_centering"),
        (AlgorithmConfig(rollout_is="sequence", score_centering=True), "score_centering"),
        (AlgorithmConfig(policy_loss="ppo"), "not known; choose one of reinforce, dis, ppo_clip, cispo"),
        (AlgorithmConfig(rollout_is="token", rollout_is_threshold="a_b"), "rollout_is_threshold"),
    ],
)
def test_an_algorithm_that_is_not_defined_is_refused(algorithm: AlgorithmConfig, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        PolicyLoss(algorithm)


@pytest.mark.parametrize("temperature", [0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_nothing_can_be_divided_by_is_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match=f"temperature={temperature}"):
        PolicyLoss(AlgorithmConfig(), temperature=temperature)
