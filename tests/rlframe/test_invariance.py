"""The same numbers however a batch is padded, permuted, cut into micro-batches and spread over ranks (case 4).

One property drives every loss and every metric. Sums over parts may round differently: gradients agree to a few ulps of
their own scale, metrics to 1e-6.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rlframe import AlgorithmConfig, Batch, LMHead, Loss, LossInputs, Metrics, PolicyLoss, ValueLoss, ValuePrediction
from tests.support.head_logprobs import HeadLogProbs
from tests.support.loss_cases import Case, make_case

LENGTHS = (9, 2, 14, 5, 1, 8)
LOSSES: dict[str, Loss] = {
    "reinforce": PolicyLoss(AlgorithmConfig()),
    "tis": PolicyLoss(AlgorithmConfig(rollout_is="token", rollout_is_threshold=1.5)),
    "icepop": PolicyLoss(AlgorithmConfig(rollout_is="token", rollout_is_threshold=[0.7, 1.5])),
    "sequence": PolicyLoss(AlgorithmConfig(rollout_is="sequence", rollout_is_threshold=1.2)),
    "sequence_band": PolicyLoss(AlgorithmConfig(rollout_is="sequence", rollout_is_threshold=[0.3, 3.0])),
    **{
        f"reject_{option}": PolicyLoss(AlgorithmConfig(rollout_rs=option, rollout_rs_threshold=threshold))
        for option, threshold in (
            ("token_k1", [0.7, 1.4]),
            ("token_k2", 0.05),
            ("token_k3", 0.05),
            ("seq_sum_k1", [0.5, 1.2]),
            ("seq_sum_k2", 0.5),
            ("seq_sum_k3", 0.5),
            ("seq_mean_k1", [0.9, 1.2]),
            ("seq_mean_k2", 0.1),
            ("seq_mean_k3", 0.1),
            ("seq_max_k2", 0.4),
            ("seq_max_k3", 0.4),
        )
    },
    "geo_rs_token_tis": PolicyLoss(
        AlgorithmConfig(rollout_is="token", rollout_rs="seq_mean_k1", rollout_rs_threshold=[0.9, 1.2]),
    ),
    "centred": PolicyLoss(AlgorithmConfig(score_centering=True)),
    "centred_tis": PolicyLoss(AlgorithmConfig(score_centering=True, rollout_is="token", rollout_is_threshold=1.2)),
    "centred_icepop": PolicyLoss(AlgorithmConfig(score_centering=True, rollout_is="token", rollout_is_threshold=[0.7, 1.5])),
    "dis": PolicyLoss(AlgorithmConfig(policy_loss="dis", clip_low=0.3, clip_high=0.6)),
    "centred_dis": PolicyLoss(AlgorithmConfig(policy_loss="dis", clip_low=0.3, clip_high=0.6, score_centering=True)),
    "ppo_clip": PolicyLoss(AlgorithmConfig(policy_loss="ppo_clip")),
    "ppo_clip_k3_rs": PolicyLoss(AlgorithmConfig(policy_loss="ppo_clip", rollout_rs="seq_mean_k3", rollout_rs_threshold=0.1)),
    "cispo": PolicyLoss(AlgorithmConfig(policy_loss="cispo")),
    "value": ValueLoss(),
    "clipped_value": ValueLoss(clip_range=0.2),
    "value_prediction": ValuePrediction(),
    "logprobs": HeadLogProbs(),
}


class Reference:
    """The whole batch in one piece, and the parameters that it trains."""

    def __init__(self) -> None:
        self.case: Case = make_case(11, lengths=LENGTHS, noise=0.4)
        torch.manual_seed(0)
        self.head = nn.Linear(8, 1).double()
        self.case.weight.requires_grad_()

    def run(self, loss: Loss, batch: Batch, hidden: Tensor):
        inputs = LossInputs(hidden, batch, LMHead(self.case.weight), lambda h: self.head(h).squeeze(-1))
        return loss(inputs)

    def parameters(self) -> list[Tensor]:
        return [self.case.weight, *self.head.parameters()]


REFERENCE = Reference()


def gradients(loss: Tensor | None, of: list[Tensor]) -> list[Tensor]:
    if loss is None:
        return []
    found = torch.autograd.grad(loss, of, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, of, strict=True)]


def padded(batch: Batch, hidden: Tensor, rng: np.random.Generator, tail: list[int]) -> tuple[Batch, Tensor]:
    """Observation rows full of garbage after every trajectory: what padding amounts to without padding."""
    rows = np.concatenate(
        [np.r_[batch.offsets[b] : batch.offsets[b + 1], np.full(tail[b], -1)] for b in range(len(batch))]
    ).astype(np.int64)
    fresh = rows < 0
    arrays = {
        name: np.where(fresh.reshape(-1, *[1] * (getattr(batch, name).ndim - 1)), filler, getattr(batch, name)[rows])
        for name, filler in (
            ("tokens", 3),
            ("action_mask", False),
            ("logprobs", np.nan),
            ("head_ids", 10**6),
            ("head_logprobs", np.nan),
            ("versions", -1),
            ("rewards", 0),
            ("advantages", np.inf),
            ("values", np.nan),
            ("returns", np.nan),
        )
    }
    garbage = torch.from_numpy(rng.normal(size=hidden.shape[1]) * 1e3).expand(len(rows), -1)
    states = torch.where(torch.from_numpy(fresh)[:, None], garbage, hidden[torch.from_numpy(rows.clip(0))])
    offsets = np.concatenate([[0], np.cumsum(batch.lengths + np.array(tail))])
    kept = {f: getattr(batch, f) for f in ("finish", "prompt_ids", "indices", "envs", "metadata", "bootstrap")}
    return Batch(offsets=offsets, **arrays, **kept), states


def parts_of(batch: Batch, hidden: Tensor, ranks: int, max_tokens: int) -> list[tuple[Batch, Tensor]]:
    """What every rank and micro-batch sees; ranks without trajectories included."""
    parts, first = [], 0
    for rank in range(ranks):
        shard = batch.shard(rank, ranks)
        for micro in shard.micro_batches(max_tokens) or [shard]:
            parts.append((micro, hidden[first : first + micro.num_tokens]))
            first += micro.num_tokens
    assert first == batch.num_tokens
    return parts


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=8, deadline=None)
@given(
    order=st.permutations(range(len(LENGTHS))),
    tail=st.lists(st.integers(0, 4), min_size=len(LENGTHS), max_size=len(LENGTHS)),
    ranks=st.integers(1, 8),
    max_tokens=st.integers(1, 60),
    seed=st.integers(0, 2**20),
)
def test_every_loss_and_every_metric(name: str, order: list[int], tail: list[int], ranks: int, max_tokens: int, seed: int):
    loss, reference = LOSSES[name], REFERENCE
    whole = reference.run(loss, reference.case.batch, reference.case.hidden)
    batch = reference.case.batch.select(order)
    rows = np.concatenate([np.arange(*reference.case.batch.offsets[b : b + 2]) for b in order])
    bootstraps = isinstance(loss, ValuePrediction)
    batch, hidden = padded(
        batch, reference.case.hidden[torch.from_numpy(rows)], np.random.default_rng(seed), [0] * 6 if bootstraps else tail
    )
    outputs = [reference.run(loss, micro, states) for micro, states in parts_of(batch, hidden, ranks, max_tokens)]

    wanted = gradients(whole.loss, [reference.case.hidden, *reference.parameters()])
    total = None if whole.loss is None else sum(out.loss for out in outputs)
    got = gradients(total, [reference.case.hidden, *reference.parameters()])
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-6, atol=1e-6 * max(1.0, float(w.abs().max())))

    expected, computed = whole.metrics.compute(), Metrics.merge(out.metrics for out in outputs).compute()
    assert computed.keys() == expected.keys()
    for key, value in expected.items():
        assert computed[key] == pytest.approx(value, rel=1e-6, abs=1e-6, nan_ok=True), key

    kept = batch.action_mask
    for key, column in whole.per_token.items():
        joined = torch.cat([out.per_token[key] for out in outputs])
        torch.testing.assert_close(joined[torch.from_numpy(kept)], column[torch.from_numpy(rows)][
            torch.from_numpy(reference.case.batch.action_mask[rows])
        ])  # fmt: skip
        assert (joined[torch.from_numpy(~kept)] == 0).all()
    for key, column in whole.per_trajectory.items():
        joined = torch.cat([out.per_trajectory[key] for out in outputs])
        torch.testing.assert_close(joined, column[torch.tensor(order)])
