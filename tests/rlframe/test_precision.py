"""What autocast, float16 and very long trajectories must not change."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlframe import AlgorithmConfig, LMHead, LogProbs, LossInputs, PolicyLoss, ValueLoss, ValuePrediction, policy_loss
from rlframe.losses.corrections import rejection, sequence_log_ratio
from rlframe.value_head import ValueHead
from tests.support.loss_cases import gradient, make_case

ON_A_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
DEVICES = ["cpu", pytest.param("cuda", marks=ON_A_GPU)]
LOSSES = {
    "reinforce": PolicyLoss(AlgorithmConfig()),
    "ppo_clip": PolicyLoss(AlgorithmConfig(policy_loss="ppo_clip")),
    "centred": PolicyLoss(AlgorithmConfig(score_centering=True, rollout_is="token")),
    "sequence": PolicyLoss(AlgorithmConfig(rollout_is="sequence")),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LOSSES)
def test_autocast_changes_no_policy_loss(name: str, device: str) -> None:
    results = []
    for enabled in (False, True):
        case = make_case(1, dtype=torch.float32, hidden=64)
        hidden = case.hidden.detach().to(device).requires_grad_()
        weight = case.weight.to(device).requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            out = LOSSES[name](LossInputs(hidden, case.batch, LMHead(weight)))
            probe = LogProbs()(LossInputs(hidden, case.batch, LMHead(weight)))
            gradients = gradient(out.loss, hidden, weight)
        numbers = torch.tensor(list(out.metrics.compute().values()))
        results.append((out.loss.detach(), *gradients, *out.per_token.values(), *probe.per_token.values(), numbers))
    for plain, cast in zip(*results, strict=True):
        assert torch.equal(plain, cast)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rank", [None, 4])
def test_autocast_changes_no_value(rank: int | None, device: str) -> None:
    results = []
    for enabled in (False, True):
        case = make_case(2, dtype=torch.float32, hidden=64)
        head = ValueHead(64, rank=rank, alpha=8.0)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        head.to(device)
        hidden = case.hidden.detach().to(device).requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            inputs = LossInputs(hidden, case.batch, value_head=head)
            out, predicted = ValueLoss()(inputs), ValuePrediction()(inputs)
            assert head(hidden).dtype == head(hidden.bfloat16()).dtype == torch.float32
            gradients = gradient(out.loss, hidden, *head.parameters())
        results.append((out.loss.detach(), *gradients, *out.per_token.values(), *predicted.per_trajectory.values()))
    for plain, cast in zip(*results, strict=True):
        assert torch.equal(plain, cast)


def test_sums_over_300_thousand_tokens_are_exact_to_the_rounding_of_their_result() -> None:
    """Ratios of 1 + 1e-6 a token: one by one in float32, each addition would lose up to 1e-8 of its 1e-6."""
    rng = np.random.default_rng(0)
    log_ratio = torch.from_numpy((rng.normal(size=400_000) * 1e-3 + 1e-4).astype(np.float32))
    segments = torch.from_numpy(np.repeat([0, 2], [300_000, 100_000]))
    total = sequence_log_ratio(log_ratio, segments, 3)
    exact = np.bincount(segments.numpy(), weights=log_ratio.double().numpy())
    np.testing.assert_allclose(total.numpy(), exact, rtol=1e-7)
    mean = exact[0] / 300_000
    for factor, kept in ((1 + 1e-5, True), (1 - 1e-5, False)):  # k1 = -log r has to stay below the upper bound's logarithm
        rule = rejection("seq_mean_k1", f"{np.exp(-mean) * 1e-3:.17g}_{np.exp(-mean * (2 - factor)):.17g}")
        assert bool(rule.keep(log_ratio, segments, 3)[0]) == kept


def test_gradients_of_float16_are_scaled_before_they_are_narrowed() -> None:
    """A raw sum over many tokens exceeds 65504, the largest float16, where the mean does not."""
    count, factor = 3000, 100.0
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(7, 16, generator=generator).half().requires_grad_()
    hidden = torch.randn(1, 16, generator=generator).half().repeat(count, 1)
    tokens, logprobs = torch.zeros(count, dtype=torch.int64), torch.full((count,), -2.0)
    out = policy_loss(hidden, weight, tokens, logprobs, torch.full((count,), factor), AlgorithmConfig())
    got = gradient(out.loss / count, weight)[0]
    double = weight.detach().double().requires_grad_()
    exact = -factor * torch.log_softmax(hidden[:1].double() @ double.T, 1)[0, 0]
    want = gradient(exact, double)[0]
    assert got.dtype == torch.float16 and float((count * want).abs().max()) > 65504
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=1e-3)
