"""Weights and rejection against the rules written out token by token, and their metrics against definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlframe import AlgorithmConfig, ConfigError, PolicyLoss, rejection, truncation
from tests.support.loss_cases import Case, dense_logprobs, gradient, make_case, sampled

LOG_R = torch.tensor([-3.0, -0.7, -0.1, 0.0, 0.2, 0.69, 0.7, 1.7, 89.0, -89.0], dtype=torch.float64)


def ratios(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """log r of every action token, and its trajectory."""
    log_p, log_q, _ = sampled(case, dense_logprobs(case).detach())
    return (log_p - log_q).numpy(), case.owners().numpy()


def test_truncation_and_band_on_the_ratio() -> None:
    bounded = [math.exp(min(max(x, -20), 20)) for x in LOG_R.tolist()]
    assert truncation(2.0).weight(LOG_R).tolist() == pytest.approx([min(r, 2.0) for r in bounded])
    assert truncation([0.5, 5.0]).weight(LOG_R).tolist() == pytest.approx([r if 0.5 <= r <= 5 else 0 for r in bounded])
    assert truncation("2.0").weight(LOG_R).isfinite().all()


def test_products_equal_the_ratio_form_and_survive_zero_probabilities() -> None:
    q = torch.tensor([0.3, 0.2, 1e-30, 0.0], dtype=torch.float64)
    p = torch.tensor([0.1, 0.5, 0.2, 0.0], dtype=torch.float64)
    for threshold in (2.0, [0.5, 5.0]):
        rule = truncation(threshold)
        product = rule.product(p, q, p.log() - q.log())
        assert torch.isfinite(product).all()
        torch.testing.assert_close(product[:2], (q * rule.weight(p.log() - q.log()))[:2])


@pytest.mark.parametrize(
    ("level", "kind"),
    [(level, f"k{n}") for level in ("token", "seq_sum", "seq_mean") for n in (1, 2, 3)]
    + [("seq_max", "k2"), ("seq_max", "k3")],
)
def test_every_rejection_option_keeps_what_its_definition_keeps(level: str, kind: str) -> None:
    rng = np.random.default_rng(0)
    lengths = [3, 1, 0, 5, 4, 2]
    segments = np.repeat(np.arange(len(lengths)), lengths)
    log_r = rng.normal(0, 0.6, len(segments))
    k = {"k1": -log_r, "k2": log_r**2 / 2, "k3": np.exp(log_r) - 1 - log_r}[kind]
    how = {"seq_sum": np.sum, "seq_mean": np.mean, "seq_max": np.max}
    statistic = k if level == "token" else np.array([how[level](k[segments == b]) for b in segments])
    upper = float(np.median(np.abs(statistic)))
    if kind == "k1":
        threshold = [math.exp(-upper / 2), math.exp(upper)]
        expected = (statistic >= -upper / 2) & (statistic <= upper * (1 + 1e-12))
    else:
        threshold, expected = upper, statistic <= upper * (1 + 1e-12)
    rule = rejection(f"{level}_{kind}", threshold if kind == "k1" else upper * (1 + 1e-9))
    got = rule.keep(torch.from_numpy(log_r), torch.from_numpy(segments), len(lengths)).numpy()
    assert 0 < expected.sum() < len(expected)
    np.testing.assert_array_equal(got, expected)


def test_the_k1_band_bounds_the_inverse_ratio() -> None:
    """k1 is -log r: [0.5, 5.0] keeps r in [0.2, 2]."""
    r = torch.tensor([0.19, 0.21, 1.99, 2.01], dtype=torch.float64)
    keep = rejection("token_k1", [0.5, 5.0]).keep(r.log(), torch.zeros(4, dtype=torch.int64), 1)
    assert keep.tolist() == [False, True, True, False]
    one_number = rejection("token_k1", 2.0).keep(torch.tensor([0.49, 0.51, 1.99, 2.01]).log(), torch.zeros(4).long(), 1)
    assert one_number.tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("option", "threshold", "sentence"),
    [
        ("token_k4", 1.0, "token_k4 is not known"),
        ("seq_max_k1", 1.0, "seq_max_k1 is not known"),
        ("token_k2", [0.1, 0.2], "takes one upper bound"),
        ("token_k1", "x", "not a threshold"),
    ],
)
def test_rejection_that_is_not_defined_is_refused(option: str, threshold: object, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        rejection(option, threshold)


def test_bypass_with_token_weights_applies_the_ratio_once() -> None:
    """Case 5: -A min(r, c) log p has derivative -A min(r, c), not its square."""
    case = make_case(1, noise=0.8)
    out = PolicyLoss(AlgorithmConfig(rollout_is="token", rollout_is_threshold=2.0))(case.inputs())
    log_p, log_q, advantages = sampled(case, dense_logprobs(case))
    weight = (log_p - log_q).detach().exp().clamp(max=2.0)
    want = gradient(-(advantages * weight * log_p).sum(), case.hidden)[0]
    torch.testing.assert_close(gradient(out.loss, case.hidden)[0], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0, 1.7])
def test_equal_weights_give_a_ratio_of_one_at_any_temperature(temperature: float) -> None:
    """Case 6: both sides are processed log-probabilities."""
    case = make_case(2, noise=0.0, temperature=temperature)
    metrics = PolicyLoss(AlgorithmConfig(rollout_is="token"), temperature)(case.inputs()).metrics.compute()
    for name in ("rollout_is_mean", "rollout_is_max", "rollout_is_min", "rollout_is_eff_sample_size"):
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(1, abs=2e-6)
    assert metrics["rollout_corr/kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("gap", [89.0, 1e4])
@pytest.mark.parametrize(
    "algorithm",
    [
        AlgorithmConfig(rollout_is="token"),
        AlgorithmConfig(rollout_is="token", rollout_is_threshold=[0.5, 5.0]),
        AlgorithmConfig(rollout_is="sequence"),
        AlgorithmConfig(rollout_rs="seq_mean_k3", rollout_rs_threshold=0.01),
        AlgorithmConfig(policy_loss="dis", clip_low=0.3, clip_high=5.0),
        AlgorithmConfig(policy_loss="ppo_clip"),
        AlgorithmConfig(policy_loss="cispo"),
    ],
)
def test_extreme_ratios_stay_finite(algorithm: AlgorithmConfig, gap: float) -> None:
    """Cases 2 and 3: exp(89) overflows fp32, and inf * 0 is NaN; neither reaches loss, gradient or metrics."""
    case = make_case(3, dtype=torch.float32)
    actions = np.flatnonzero(case.batch.action_mask)
    case.batch.logprobs[actions[::3]] -= gap
    out = PolicyLoss(algorithm)(case.inputs())
    assert out.loss.isfinite() and gradient(out.loss, case.hidden)[0].isfinite().all()
    assert all(math.isfinite(value) for value in out.metrics.compute().values())


def test_metrics_equal_their_definitions() -> None:
    case = make_case(4, lengths=(9, 5, 14, 8), noise=0.6)
    metrics = PolicyLoss(
        AlgorithmConfig(rollout_is="token", rollout_is_threshold=1.5, rollout_rs="token_k2", rollout_rs_threshold=0.1)
    )(case.inputs()).metrics.compute()
    log_r, owner = ratios(case)
    log_p, log_q, advantages = (x.numpy() for x in sampled(case, dense_logprobs(case).detach()))
    weights, keep = np.minimum(np.exp(log_r), 1.5), log_r**2 / 2 <= 0.1
    sequences = [owner == b for b in range(4)]
    expected = {
        "rollout_corr/kl": -log_r.mean(),
        "rollout_corr/k3_kl": (np.exp(log_r) - 1 - log_r).mean(),
        "rollout_corr/log_ratio_abs_max": np.abs(log_r).max(),
        "rollout_corr/chi2_token": (np.exp(log_r) ** 2).mean() - 1,
        "rollout_corr/chi2_seq": np.mean([np.exp(2 * log_r[s].sum()) for s in sequences]) - 1,
        "rollout_corr/training_ppl": np.mean([np.exp(-log_p[s].mean()) for s in sequences]),
        "rollout_corr/rollout_ppl": np.mean([np.exp(-log_q[s].mean()) for s in sequences]),
        "rollout_corr/rollout_is_mean": weights.mean(),
        "rollout_corr/rollout_is_max": weights.max(),
        "rollout_corr/rollout_is_min": weights.min(),
        "rollout_corr/rollout_is_eff_sample_size": weights.sum() ** 2 / (len(weights) * (weights**2).sum()),
        "rollout_corr/rollout_rs_masked_fraction": (~keep).mean(),
        "rollout_corr/expected_score_l1": np.abs(1 - np.exp(log_r)).mean(),
        "actor/advantage_mean": advantages.mean(),
        "actor/clip_fraction": (np.exp(log_r) > 1.5).mean(),
        "actor/pg_loss": -(keep * advantages * weights * log_p).mean(),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    assert 0 < metrics["rollout_corr/rollout_rs_masked_fraction"] < 1


def test_sequence_weights_are_reported_per_token_as_they_are_applied() -> None:
    case = make_case(5, lengths=(9, 5, 14, 8), noise=0.6)
    algorithm = AlgorithmConfig(rollout_is="sequence", rollout_is_threshold=[0.5, 2.0])
    metrics = PolicyLoss(algorithm)(case.inputs()).metrics.compute()
    log_r, owner = ratios(case)
    r = np.array([np.exp(log_r[owner == b].sum()) for b in owner])
    weights = np.where((r >= 0.5) & (r <= 2), r, 0)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(weights.mean(), rel=1e-5)
    assert metrics["actor/clip_fraction"] == pytest.approx((weights != r).mean())


def test_fully_masked_trajectories_change_no_metric() -> None:
    """Case 1: a perplexity that averages over empty rows fell from 7.39 to 2.60."""
    case = make_case(6, lengths=(9, 5, 14))
    padded = make_case(6, lengths=(9, 5, 14, 7, 11))
    off = padded.batch.offsets[3]
    padded.batch.action_mask[off:] = False
    padded.batch.logprobs[off:] = 7.0
    algorithm = AlgorithmConfig(rollout_is="sequence", rollout_rs="seq_mean_k3", rollout_rs_threshold=0.1)
    want = PolicyLoss(algorithm)(case.inputs())
    padded.hidden.data[: case.batch.num_tokens] = case.hidden.data
    padded.weight = case.weight
    for f in ("tokens", "action_mask", "logprobs", "advantages"):
        getattr(padded.batch, f)[:off] = getattr(case.batch, f)
    got = PolicyLoss(algorithm)(padded.inputs())
    torch.testing.assert_close(got.loss, want.loss)
    for name, value in want.metrics.compute().items():
        assert got.metrics.compute()[name] == pytest.approx(value, rel=1e-12), name


def test_rejected_tokens_stay_in_the_denominator() -> None:
    case = make_case(7, noise=0.6)
    out = PolicyLoss(AlgorithmConfig(rollout_rs="token_k2", rollout_rs_threshold=0.1))(case.inputs())
    total, count = out.metrics.sums["actor/pg_loss"]
    assert count == case.batch.num_actions
    assert total == pytest.approx(float(out.loss.detach()), rel=1e-6)
