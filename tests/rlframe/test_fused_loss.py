"""The fused pass against full logits and plain autograd in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlframe import AlgorithmConfig, LMHead, LossInputs, PolicyLoss, policy_loss
from rlframe.losses import projection
from tests.support.head_logprobs import HeadLogProbs
from tests.support.loss_cases import Case, dense_logprobs, gradient, make_case, sampled

REINFORCE = AlgorithmConfig()
SEQUENCE = AlgorithmConfig(rollout_is="sequence", rollout_is_threshold=1.5, rollout_rs="seq_mean_k3", rollout_rs_threshold=0.1)


@pytest.fixture(params=[1, 3, 1000])
def rows_per_chunk(request, monkeypatch) -> int:
    """Chunks of one token, of a few that do not divide the batch, and one chunk for all."""
    monkeypatch.setitem(projection.CHUNK_BYTES, "cpu", request.param * 37 * 8)
    return request.param


def dense_reinforce(case: Case, logits: Tensor) -> Tensor:
    log_p, _, advantages = sampled(case, torch.log_softmax(logits / case.temperature, -1))
    return -(advantages * log_p).sum()


def test_gradients_and_outputs_equal_full_logits(rows_per_chunk) -> None:
    case = make_case(temperature=0.7)
    case.weight.requires_grad_()
    out = PolicyLoss(REINFORCE, 0.7)(case.inputs())
    full = dense_logprobs(case)
    log_p, _, advantages = sampled(case, full)
    expected = -(advantages * log_p).sum()
    torch.testing.assert_close(out.loss, expected, rtol=1e-12, atol=1e-12)
    for got, want in zip(
        gradient(out.loss, case.hidden, case.weight), gradient(expected, case.hidden, case.weight), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    rows = case.rows()
    torch.testing.assert_close(out.per_token["logprobs"][rows].double(), log_p.detach(), rtol=1e-6, atol=1e-6)
    entropy = torch.distributions.Categorical(logits=full).entropy()
    torch.testing.assert_close(out.per_token["entropy"][rows].double(), entropy.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("bias", "softcap", "scale"), [(True, None, 1.0), (False, 3.0, 1.0), (True, 2.0, 0.5), (False, None, 2.5)]
)
def test_output_layers_of_the_architectures(bias: bool, softcap: float | None, scale: float, rows_per_chunk) -> None:
    case = make_case(temperature=1.3)
    case.weight.requires_grad_()
    b = torch.randn(37, dtype=torch.float64, requires_grad=True) if bias else None
    out = PolicyLoss(REINFORCE, 1.3)(case.inputs(bias=b, softcap=softcap, scale=scale))
    logits = case.hidden[case.rows() - 1] @ case.weight.T
    logits = scale * (logits if b is None else logits + b)
    expected = dense_reinforce(case, logits if softcap is None else softcap * torch.tanh(logits / softcap))
    wrt = [case.hidden, case.weight] + ([] if b is None else [b])
    for got, want in zip(gradient(out.loss, *wrt), gradient(expected, *wrt), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


def test_a_bias_may_mask_part_of_the_vocabulary() -> None:
    case = make_case()
    unused = np.setdiff1d(np.arange(37), case.batch.tokens[case.batch.action_mask])[:5]
    bias = torch.zeros(37, dtype=torch.float64)
    bias[unused] = -torch.inf
    out = PolicyLoss(REINFORCE)(case.inputs(bias=bias))
    kept = np.setdiff1d(np.arange(37), unused)
    full = torch.log_softmax(case.hidden[case.rows() - 1] @ case.weight[kept].T, -1)
    entropy = torch.distributions.Categorical(logits=full.detach()).entropy()
    torch.testing.assert_close(out.per_token["entropy"][case.rows()].double(), entropy, rtol=1e-6, atol=1e-6)
    assert gradient(out.loss, case.hidden)[0].isfinite().all()


@pytest.mark.parametrize("train_head", [False, True])
def test_factors_of_whole_trajectories_reach_every_gradient(train_head: bool, rows_per_chunk) -> None:
    case = make_case(3, lengths=(9, 5, 14, 8), noise=0.7)
    case.weight.requires_grad_(train_head)
    out = PolicyLoss(SEQUENCE)(case.inputs())
    log_p, log_q, advantages = sampled(case, dense_logprobs(case))
    log_r = (log_p - log_q).detach()
    owner = case.owners()
    factor = torch.zeros_like(log_r)
    for b in range(4):
        of_b = owner == b
        kept = (log_r[of_b].exp() - 1 - log_r[of_b]).mean() <= 0.1
        factor[of_b] = log_r[of_b].sum().exp().clamp(max=1.5) if kept else 0.0
    assert 0 < (factor == 0).sum() < len(factor)
    expected = -(factor * advantages * log_p).sum()
    wrt = [case.hidden] + ([case.weight] if train_head else [])
    torch.testing.assert_close(out.loss, expected, rtol=1e-6, atol=1e-6)
    for got, want in zip(gradient(out.loss, *wrt), gradient(expected, *wrt), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_frozen_head_gets_no_gradient_and_backward_may_run_twice() -> None:
    case = make_case()
    out = PolicyLoss(REINFORCE)(case.inputs())
    first = torch.autograd.grad(2 * out.loss, case.hidden, retain_graph=True)[0]
    second = torch.autograd.grad(out.loss, case.hidden)[0]
    torch.testing.assert_close(first, 2 * second)
    assert case.weight.grad is None


def test_rows_that_produced_no_action_get_exactly_zero_gradient() -> None:
    case = make_case()
    out = PolicyLoss(REINFORCE)(case.inputs())
    gradients = gradient(out.loss, case.hidden)[0]
    others = torch.ones(len(gradients), dtype=torch.bool)
    others[case.rows() - 1] = False
    assert (gradients[others] == 0).all() and (gradients[~others] != 0).any(dim=1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_inputs_are_computed_in_float32(dtype: torch.dtype, rows_per_chunk) -> None:
    """bf16 logits would be off by about 1e-2; exact products of bf16 inputs are not."""
    case = make_case(dtype=dtype, sharpness=2.0)
    case.weight.requires_grad_()
    precision = torch.backends.mkldnn.matmul.fp32_precision
    out = PolicyLoss(REINFORCE)(case.inputs())
    log_p, _, advantages = sampled(case, dense_logprobs(case))
    got = out.per_token["logprobs"][case.rows()].double()
    torch.testing.assert_close(got, log_p.detach(), rtol=0, atol=2e-5)
    wanted = gradient(-(advantages * log_p).sum(), case.hidden, case.weight)
    for got, want in zip(gradient(out.loss, case.hidden, case.weight), wanted, strict=True):
        assert got.dtype == dtype
        # dL/dz is rounded once and so is the result: an error of 2**-9 of each, against sums of terms of size one.
        rounded = dtype == torch.bfloat16
        torch.testing.assert_close(
            got.double(), want.double(), rtol=2**-8 if rounded else 1e-4, atol=2**-7 if rounded else 1e-4
        )
    assert torch.backends.mkldnn.matmul.fp32_precision == precision, "the rest of the process computes as before"


class _LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(result) if isinstance(t, Tensor))])
        return result


@pytest.mark.parametrize("centred", [False, True])
def test_full_logits_are_never_held(centred: bool, monkeypatch) -> None:
    monkeypatch.setitem(projection.CHUNK_BYTES, "cpu", 4 * 500 * 4)
    case = make_case(lengths=(60, 40), vocabulary=500, k=4, dtype=torch.float32)
    case.weight.requires_grad_()
    with _LargestTensor() as seen:
        PolicyLoss(AlgorithmConfig(score_centering=centred))(case.inputs()).loss.backward()
    assert seen.numel == 500 * 8, "the largest tensor is the gradient of the weight, not logits"


def test_without_a_graph_nothing_is_differentiated() -> None:
    case = make_case()
    case.weight.requires_grad_()
    with torch.no_grad():
        out = PolicyLoss(REINFORCE)(case.inputs())
    assert not out.loss.requires_grad


def test_logprobs_gives_entropy_and_the_head_of_every_action_token(rows_per_chunk) -> None:
    case = make_case(temperature=0.6)
    out = HeadLogProbs(0.6)(case.inputs())
    full, rows = dense_logprobs(case).detach(), case.rows()
    heads = torch.from_numpy(case.batch.head_ids).long()[rows]
    torch.testing.assert_close(out.per_token["head_logprobs"][rows].double(), full.gather(1, heads), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.per_token["logprobs"][rows].double(), sampled(case, full)[0], rtol=1e-6, atol=1e-6)
    off = torch.from_numpy(~case.batch.action_mask)
    assert all((column[off] == 0).all() for column in out.per_token.values())


def test_a_rank_without_trajectories_gets_a_zero_loss_with_zero_gradients() -> None:
    case = make_case()
    case.weight.requires_grad_()
    nothing = LossInputs(case.hidden[:0], case.batch.select([]), LMHead(case.weight))
    for algorithm in (REINFORCE, SEQUENCE, AlgorithmConfig(score_centering=True)):
        out = PolicyLoss(algorithm)(nothing)
        assert out.loss == 0 and out.metrics.compute() == {}
        assert all((g == 0).all() for g in gradient(out.loss, case.hidden, case.weight))


def test_functional_form_equals_the_batch_form() -> None:
    case = make_case(5)
    rows = case.rows()
    owner = case.owners()
    for algorithm in (REINFORCE, SEQUENCE, AlgorithmConfig(score_centering=True, rollout_is="token")):
        want = PolicyLoss(algorithm)(case.inputs())
        got = policy_loss(
            case.hidden[rows - 1],
            case.weight,
            torch.from_numpy(case.batch.tokens)[rows],
            torch.from_numpy(case.batch.logprobs)[rows],
            torch.from_numpy(case.batch.advantages)[rows],
            algorithm,
            segments=owner,
            head_ids=torch.from_numpy(case.batch.head_ids)[rows],
            head_logprobs=torch.from_numpy(case.batch.head_logprobs)[rows],
        )
        torch.testing.assert_close(got.loss, want.loss)
        assert got.metrics.compute() == want.metrics.compute()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bfloat16_on_cuda_accumulates_in_float32() -> None:
    case = make_case(dtype=torch.bfloat16, sharpness=2.0)
    log_p, _, advantages = sampled(case, dense_logprobs(case))
    want = gradient(-(advantages * log_p).sum(), case.hidden)[0]
    hidden = case.hidden.detach().cuda().requires_grad_()
    weight = case.weight.cuda().requires_grad_()
    out = PolicyLoss(REINFORCE)(LossInputs(hidden, case.batch, LMHead(weight)))
    out.loss.backward()
    torch.testing.assert_close(out.per_token["logprobs"].cpu()[case.rows()].double(), log_p.detach(), rtol=0, atol=2e-5)
    torch.testing.assert_close(hidden.grad.cpu().double(), want.double(), rtol=2e-2, atol=2e-2)
