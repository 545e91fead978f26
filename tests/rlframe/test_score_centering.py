"""Score centering against a dense float64 oracle that takes the expectation over the whole vocabulary."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rlframe import AlgorithmConfig, Batch, PolicyLoss, Trajectory, policy_loss
from tests.support.head_logprobs import HeadLogProbs
from tests.support.loss_cases import gradient, make_case

V, K, FLOOR = 40, 10, 1e-6
Rule = Callable[[Tensor], Tensor]
# The rules on the ratio itself, as the papers write them.
RULES: dict[str, tuple[AlgorithmConfig, Rule]] = {
    "none": (AlgorithmConfig(), torch.ones_like),
    "tis": (AlgorithmConfig(rollout_is="token", rollout_is_threshold=2.0), lambda r: r.clamp(max=2.0)),
    "icepop": (
        AlgorithmConfig(rollout_is="token", rollout_is_threshold=[0.5, 5.0]),
        lambda r: torch.where((r >= 0.5) & (r <= 5.0), r, 0.0),
    ),
    "dis": (
        AlgorithmConfig(policy_loss="dis", clip_low=0.3, clip_high=5.0),
        lambda r: torch.where((r > 0.7) & (r < 6.0), r, 0.0),
    ),
    "cispo": (AlgorithmConfig(policy_loss="cispo", clip_low=0.3, clip_high=1.0), lambda r: r.clamp(0.7, 2.0)),
}


def with_tail(generator: torch.Generator, tail: float, count: int) -> Tensor:
    """float64[count, V] logits whose first K entries hold all but ``tail`` of the probability."""
    z = torch.randn(count, V, generator=generator, dtype=torch.float64)
    head, rest = torch.log_softmax(z[:, :K], 1), torch.log_softmax(z[:, K:], 1)
    return torch.cat([head + np.log1p(-tail), rest + np.log(tail)], 1)


def oracle(z: Tensor, log_q: Tensor, y: Tensor, advantages: Tensor, f: Rule, head: Tensor) -> Tensor:
    """-A (sg[f(p_y / q_y)] log p_y - sum over the vocabulary of sg[q f(p / q)] log p), q being rho p outside of the head."""
    log_p = torch.log_softmax(z, 1)
    p, q = log_p.detach().exp(), log_q.exp()
    inside = torch.zeros_like(p, dtype=torch.bool).scatter(1, head, True)
    q_tail = (1 - (q * inside).sum(1)).clamp(min=FLOOR)
    p_tail = (1 - (p * inside).sum(1)).clamp(min=FLOOR)
    model = torch.where(inside, q, p * (q_tail / p_tail)[:, None])
    expected = (model * f(p / model) * log_p).sum(1)
    own = f((p / q).gather(1, y[:, None])).squeeze(1) * log_p.gather(1, y[:, None]).squeeze(1)
    return -(advantages * (own - expected)).sum()


def centred_gradient(
    z: Tensor, log_q: Tensor, y: Tensor, advantages: Tensor, algorithm: AlgorithmConfig, head: Tensor
) -> Tensor:
    """Gradient with respect to the logits: hidden states times an identity projection are logits."""
    hidden = z.detach().clone().requires_grad_()
    out = policy_loss(
        hidden,
        torch.eye(V, dtype=z.dtype),
        y,
        log_q.gather(1, y[:, None]).squeeze(1),
        advantages,
        replace(algorithm, score_centering=True),
        head_ids=head,
        head_logprobs=log_q.gather(1, head),
    )
    return gradient(out.loss, hidden)[0]


@pytest.mark.parametrize("rule", RULES)
def test_gradient_equals_the_dense_oracle(rule: str) -> None:
    """Tails from 1e-8 to 0.5 on both sides, the sampled token in and out of the head, both signs of the advantage."""
    algorithm, f = RULES[rule]
    generator = torch.Generator().manual_seed(1)
    tails = (1e-8, 1e-4, 1e-2, 0.5)
    for p_tail, q_tail in itertools.product(tails, tails):
        z = with_tail(generator, p_tail, 8).requires_grad_()
        log_q = torch.log_softmax(with_tail(generator, q_tail, 8), 1)
        y = torch.tensor([0, 3, K - 1, 5, K, V - 1, 17, 25])
        advantages = torch.tensor([1.0, -1.0, 0.3, -2.0, 1.0, -1.0, 2.0, -0.5], dtype=torch.float64)
        head = torch.arange(K).expand(8, K)
        got = centred_gradient(z, log_q, y, advantages, algorithm, head)
        want = gradient(oracle(z, log_q, y, advantages, f, head), z)[0]
        # Coefficients are as large as rho; beyond 1e5 their rounding alone exceeds 1e-10.
        rho = max(q_tail, FLOOR) / max(p_tail, FLOOR)
        assert (got - want).abs().max() < max(1e-10, 1e-15 * rho)


@pytest.mark.parametrize("rule", RULES)
def test_a_head_over_the_whole_vocabulary_is_exact(rule: str) -> None:
    algorithm, f = RULES[rule]
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(6, V, generator=generator, dtype=torch.float64, requires_grad=True)
    log_q = torch.log_softmax(torch.randn(6, V, generator=generator, dtype=torch.float64), 1)
    y, head = torch.arange(6), torch.arange(V).expand(6, V)
    log_p = torch.log_softmax(z, 1)
    p, q = log_p.detach().exp(), log_q.exp()
    weights = q * f(p / q)
    own = (f(p / q) * log_p).gather(1, y[:, None]).squeeze(1)
    want = gradient(-(own - (weights * log_p).sum(1)).sum(), z)[0]
    got = centred_gradient(z, log_q, y, torch.ones(6, dtype=torch.float64), algorithm, head)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_constant_reward_gives_no_drift(rule: str) -> None:
    """Sum over y of q_y grad is what a policy learns from rewards that say nothing."""
    algorithm, _ = RULES[rule]
    generator = torch.Generator().manual_seed(3)
    z = (0.7 * torch.randn(1, V, generator=generator, dtype=torch.float64)).expand(V, V)
    log_q = torch.log_softmax(0.7 * torch.randn(1, V, generator=generator, dtype=torch.float64), 1).expand(V, V)
    y = torch.arange(V)
    head = log_q.topk(V - 1).indices
    centred = centred_gradient(z, log_q, y, log_q[0].exp(), algorithm, head).sum(0)
    hidden = z.clone().requires_grad_()
    plain = policy_loss(hidden, torch.eye(V, dtype=z.dtype), y, log_q[0], log_q[0].exp(), algorithm)
    assert gradient(plain.loss, hidden)[0].sum(0).norm() > 0.03
    assert centred.abs().max() < 1e-15


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_on_policy_it_is_the_plain_loss_to_the_bit(rule: str, temperature: float) -> None:
    case = make_case(7, temperature=temperature, dtype=torch.float32)
    on_policy = HeadLogProbs(temperature)(case.inputs())
    case.batch.logprobs = on_policy.per_token["logprobs"].numpy()
    case.batch.head_logprobs = on_policy.per_token["head_logprobs"].numpy()
    plain = PolicyLoss(RULES[rule][0], temperature)(case.inputs())
    centred = PolicyLoss(replace(RULES[rule][0], score_centering=True), temperature)(case.inputs())
    assert torch.equal(plain.loss, centred.loss)
    assert torch.equal(gradient(plain.loss, case.hidden)[0], gradient(centred.loss, case.hidden)[0])
    assert centred.metrics.compute()["actor/sc_coefficient_l1"] == 0


def test_in_band_truncated_weights_leave_nothing_to_centre() -> None:
    """With f(r) = r every term of the expectation is p, whose expected score is zero."""
    generator = torch.Generator().manual_seed(4)
    z = torch.randn(5, V, generator=generator, dtype=torch.float64)
    log_q = torch.log_softmax(z + 0.1 * torch.randn(5, V, generator=generator, dtype=torch.float64), 1)
    y, head = torch.arange(5), log_q.topk(K).indices
    plain = z.clone().requires_grad_()
    algorithm = RULES["tis"][0]
    loss = policy_loss(plain, torch.eye(V).double(), y, log_q.gather(1, y[:, None]).squeeze(1), torch.ones(5), algorithm).loss
    got = centred_gradient(z, log_q, y, torch.ones(5, dtype=torch.float64), algorithm, head)
    assert torch.equal(got, gradient(loss, plain)[0])


def test_a_masked_sampled_token_still_moves_the_policy() -> None:
    """IcePop gives the sampled token weight 0, but the residual of the head remains."""
    z = torch.zeros(1, V, dtype=torch.float64)
    log_q = torch.log_softmax(torch.where(torch.arange(V) == 0, 4.0, 0.0).double(), 0)[None]
    y, head = torch.tensor([0]), log_q.topk(K).indices
    got = centred_gradient(z, log_q, y, torch.ones(1, dtype=torch.float64), RULES["icepop"][0], head)
    assert got.abs().max() > 1e-3


@pytest.mark.parametrize("rule", ["none", "tis", "icepop"])
def test_padded_entries_of_the_head_count_nothing(rule: str) -> None:
    algorithm, _ = RULES[rule]
    generator = torch.Generator().manual_seed(5)
    z = torch.randn(4, V, generator=generator, dtype=torch.float64)
    log_q = torch.log_softmax(torch.randn(4, V, generator=generator, dtype=torch.float64), 1)
    y, head = torch.arange(4), log_q.topk(K).indices
    want = centred_gradient(z, log_q, y, torch.ones(4, dtype=torch.float64), algorithm, head)
    hidden = z.clone().requires_grad_()
    padded_ids = torch.cat([head, torch.tensor([[-1, 0, 10**6]]).expand(4, 3)], 1)
    padded = torch.cat([log_q.gather(1, head), torch.full((4, 3), -torch.inf, dtype=torch.float64)], 1)
    sampled = log_q.gather(1, y[:, None]).squeeze(1)
    out = policy_loss(
        hidden,
        torch.eye(V, dtype=torch.float64),
        y,
        sampled,
        torch.ones(4),
        replace(algorithm, score_centering=True),
        head_ids=padded_ids,
        head_logprobs=padded,
    )
    assert out.loss.isfinite()
    torch.testing.assert_close(gradient(out.loss, hidden)[0], want, rtol=0, atol=1e-15)


def test_an_empty_trainer_tail_gives_large_coefficients_but_a_right_gradient() -> None:
    """p_tail at the floor and q_tail = 1e-3: rho = 1000, the loss value is meaningless, the fp32 gradient is good to 2e-4."""
    generator = torch.Generator().manual_seed(6)
    z = with_tail(generator, 1e-9, 4)
    log_q = torch.log_softmax(with_tail(generator, 1e-3, 4), 1)
    y, head = torch.arange(4), torch.arange(K).expand(4, K)
    advantages = torch.ones(4, dtype=torch.float64)
    want = gradient(oracle(z.requires_grad_(), log_q, y, advantages, torch.ones_like, head), z)[0]
    got = centred_gradient(z.float(), log_q.float(), y, advantages.float(), RULES["none"][0], head)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=5e-4)


def test_peaked_heads_whose_float32_sum_exceeds_one_stay_finite() -> None:
    generator = torch.Generator().manual_seed(8)
    z = (30 * torch.randn(64, V, generator=generator)).requires_grad_()
    log_q = torch.log_softmax(z.detach() + torch.randn(64, V, generator=generator), 1)
    head = log_q.topk(K).indices
    assert (log_q.gather(1, head).exp().sum(1) >= 1).any()
    got = centred_gradient(z, log_q, head[:, 0], torch.ones(64), RULES["none"][0], head)
    assert got.isfinite().all() and got.abs().max() < 10


def test_head_masses_and_coefficients_are_reported() -> None:
    case = make_case(9)
    metrics = PolicyLoss(AlgorithmConfig(score_centering=True))(case.inputs()).metrics.compute()
    rows, heads = case.rows(), torch.from_numpy(case.batch.head_ids).long()
    q = case.sampler[rows].exp().gather(1, heads[rows])
    p = torch.softmax(case.hidden.detach()[rows - 1] @ case.weight.T, 1).gather(1, heads[rows])
    assert metrics["actor/sc_sampler_head_mass"] == pytest.approx(float(q.sum(1).mean()), rel=1e-5)
    assert metrics["actor/sc_train_head_mass"] == pytest.approx(float(p.sum(1).mean()), rel=1e-5)
    c = q - ((1 - q.sum(1)) / (1 - p.sum(1)))[:, None] * p
    assert metrics["actor/sc_coefficient_l1"] == pytest.approx(float(c.abs().sum(1).mean()), rel=1e-5)
    assert metrics["actor/sc_correction"] == pytest.approx(float((c * p.log()).sum(1).mean()), rel=1e-4)


def fields(batch: Batch, b: int) -> dict:
    t = batch.trajectory(b)
    return {name: np.array(value) if isinstance(value, np.ndarray) else value for name, value in vars(t).items()}


def shift(t: dict) -> None:
    t["head_ids"], t["head_logprobs"] = np.roll(t["head_ids"], 1, axis=0), np.roll(t["head_logprobs"], 1, axis=0)


def duplicate(t: dict) -> None:
    t["head_ids"][:, 1] = t["head_ids"][:, 0]


def overfull(t: dict) -> None:
    t["head_logprobs"][:, -3:] = np.log(0.4)


def positive(t: dict) -> None:
    t["head_logprobs"][:, -1] = 0.5


@pytest.mark.parametrize("damage", [shift, duplicate, overfull, positive])
def test_a_damaged_head_is_refused_with_the_name_of_the_trajectory(damage) -> None:
    case = make_case(10, lengths=(12, 30), sharpness=1.5)
    t = fields(case.batch, 1)
    damage(t)
    with pytest.raises(ValueError, match=r"trajectory of prompt 'p1' \(index 1\).*action token \d+"):
        Trajectory(**t)
    rows = slice(*case.batch.offsets[1:3])
    for name in ("head_ids", "head_logprobs"):
        getattr(case.batch, name)[rows] = t[name]
    with pytest.raises(ValueError, match=r"trajectory of prompt 'p1' \(index 1\)"):
        PolicyLoss(AlgorithmConfig(score_centering=True))(case.inputs())


def test_a_row_without_a_head_is_refused_with_the_name_of_the_trajectory() -> None:
    case = make_case(11)
    row = int(case.rows()[-1])
    case.batch.head_logprobs[row] = -np.inf
    with pytest.raises(ValueError, match=r"'p2'.*has no head"):
        PolicyLoss(AlgorithmConfig(score_centering=True))(case.inputs())
    headless = make_case(11, k=0)
    with pytest.raises(ValueError, match="no heads"):
        PolicyLoss(AlgorithmConfig(score_centering=True))(headless.inputs())


def test_what_lies_in_the_heads_of_masked_rows_is_ignored() -> None:
    case = make_case(12)
    algorithm = AlgorithmConfig(score_centering=True)
    clean = PolicyLoss(algorithm)(case.inputs())
    off = ~case.batch.action_mask
    case.batch.head_ids[off], case.batch.head_logprobs[off] = 10**6, np.nan
    dirty = PolicyLoss(algorithm)(case.inputs())
    assert torch.equal(clean.loss, dirty.loss)
    assert clean.metrics.compute() == dirty.metrics.compute()
