"""GSPO against its paper's objective on full logits, differentiated by autograd in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlframe import AlgorithmConfig, ConfigError, PolicyLoss
from rlframe.losses import projection
from rlframe.losses.sequence.gspo import GSPO
from rlframe.losses.sequences import Sequences
from tests.support.loss_cases import Case, dense_logprobs, gradient, make_case, sampled

ADVANTAGES = (1.5, -0.7, 0.9, 1.1)
GSPO_CLIP = AlgorithmConfig(policy_loss="gspo", clip_low=0.1, clip_high=0.05)


def one_advantage_each(case: Case) -> Case:
    """Advantages of `group` and its kin: the same for every token of a trajectory."""
    for b, value in enumerate(ADVANTAGES):
        rows = slice(case.batch.offsets[b], case.batch.offsets[b + 1])
        case.batch.advantages[rows] = value * case.batch.action_mask[rows]
    return case


def paper(case: Case) -> tuple[Tensor, Tensor]:
    """sum of |y_i| min(s_i A_i, clip(s_i) A_i), negated, with a live s_i (equations 5 to 7 times |y_i|); and s [B]."""
    log_p, log_q, advantages = sampled(case, dense_logprobs(case))
    total, ratios = torch.zeros((), dtype=torch.float64), []
    for b in range(len(case.batch)):
        own = case.owners() == b
        s = ((log_p - log_q)[own].sum() / own.sum()).exp()
        a = advantages[own][0]
        total = total - own.sum() * torch.minimum(s * a, s.clamp(0.9, 1.05) * a)
        ratios.append(s.detach())
    return total, torch.stack(ratios)


@pytest.mark.parametrize("trains_head", [False, True])
@pytest.mark.parametrize("rows_per_chunk", [1, 3, 1000])
def test_gspo_is_the_papers_objective_with_every_trajectory_weighted_by_its_length(
    trains_head: bool, rows_per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(projection.CHUNK_BYTES, "cpu", rows_per_chunk * 37 * 8)
    case = one_advantage_each(make_case(5, lengths=(9, 5, 14, 8), noise=0.35))
    case.weight.requires_grad_(trains_head)
    out = PolicyLoss(GSPO_CLIP)(case.inputs())
    expected, s = paper(case)
    torch.testing.assert_close(out.loss, expected, rtol=1e-6, atol=1e-8)
    trained = [case.hidden, case.weight] if trains_head else [case.hidden]
    for got, want in zip(gradient(out.loss, *trained), gradient(expected, *trained), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
    lengths = torch.bincount(case.owners()).double()
    signs = torch.tensor(ADVANTAGES)
    clipped = ((signs > 0) & (s > 1.05)) | ((signs < 0) & (s < 0.9))
    assert 0 < clipped.sum() < 4, "the case clips some trajectories and leaves others"
    metrics = out.metrics.compute()
    assert metrics["actor/clip_fraction"] == pytest.approx(float((clipped * lengths).sum() / lengths.sum()))
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(float(torch.where(clipped, 0, s).max()), rel=1e-5)


def test_advantages_of_single_tokens_take_the_ratio_of_the_trajectory() -> None:
    """GSPO-token: the ratio of token t is sg[s] p_t / sg[p_t], so it has the trajectory's size and its own gradient."""
    case = make_case(5, lengths=(9, 14), noise=0.1)
    out = PolicyLoss(AlgorithmConfig(policy_loss="gspo", clip_low=0.5, clip_high=0.5))(case.inputs())
    log_p, log_q, advantages = sampled(case, dense_logprobs(case))
    expected = torch.zeros((), dtype=torch.float64)
    for b in range(2):
        own = case.owners() == b
        s = (log_p - log_q)[own].mean().exp().detach() * (log_p[own] - log_p[own].detach()).exp()
        expected = expected - torch.minimum(s * advantages[own], s.clamp(0.5, 1.5) * advantages[own]).sum()
    torch.testing.assert_close(out.loss, expected, rtol=1e-6, atol=1e-8)
    got, want = (gradient(loss, case.hidden)[0] for loss in (out.loss, expected))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


def test_rejection_drops_tokens_of_a_sequence_loss() -> None:
    case = one_advantage_each(make_case(5, lengths=(9, 5, 14, 8), noise=0.35))
    rejecting = AlgorithmConfig(
        policy_loss="gspo", clip_low=0.1, clip_high=0.05, rollout_rs="token_k2", rollout_rs_threshold=0.02
    )
    out, plain = PolicyLoss(rejecting)(case.inputs()), PolicyLoss(GSPO_CLIP)(case.inputs())
    log_p, log_q, _ = (x.detach() for x in sampled(case, dense_logprobs(case)))
    kept = (log_p - log_q).square() / 2 <= 0.02
    assert 0 < kept.sum() < len(kept)
    # Rows of hidden states that only one token reads: what is kept has the gradient that it had, the rest has none.
    got, want = (gradient(o.loss, case.hidden)[0][case.rows() - 1] for o in (out, plain))
    torch.testing.assert_close(got, torch.where(kept[:, None], want, 0.0), rtol=1e-12, atol=0)
    masked = float((~kept).double().mean())
    assert out.metrics.compute()["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(masked)


def test_a_trajectory_without_action_tokens_and_a_rank_without_trajectories_are_no_trouble() -> None:
    sequences = Sequences(torch.tensor([0, 0, 2]), 3)
    assert sequences.mean(torch.tensor([1.0, 3.0, 5.0])).tolist() == [2, 0, 5]
    assert sequences.max(torch.tensor([-1.0, -3.0, 5.0])).tolist() == [-1, 0, 5]
    nothing = torch.zeros(0)
    assert GSPO(0.9, 1.1)(nothing, nothing, nothing, Sequences(nothing.long(), 0)).loss.shape == (0,)


def test_a_sequence_loss_has_no_scores_to_centre() -> None:
    with pytest.raises(
        ConfigError, match=r"policy_loss=gspo weighs a token by its whole trajectory; choose .*reinforce, dis, cispo"
    ):
        PolicyLoss(AlgorithmConfig(policy_loss="gspo", score_centering=True))
    with pytest.raises(ConfigError, match="apply the ratio twice"):
        PolicyLoss(AlgorithmConfig(policy_loss="gspo", rollout_is="sequence"))
