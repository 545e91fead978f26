"""The fused pass on several ranks; each function runs on every rank of its group (see `rank_pool`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from rlframe import AlgorithmConfig, LMHead, LossInputs, LossOutputs, PolicyLoss
from tests.support.head_logprobs import HeadLogProbs
from tests.support.loss_cases import Case, make_case

ALGORITHMS = (
    AlgorithmConfig(),
    AlgorithmConfig(score_centering=True, rollout_is="token"),
    AlgorithmConfig(rollout_is="sequence", rollout_rs="seq_mean_k3", rollout_rs_threshold=0.1),
    AlgorithmConfig(policy_loss="ppo_clip"),
)


def _whole(case: Case, algorithm: AlgorithmConfig, softcap: float | None) -> tuple[LossOutputs, Tensor, Tensor, Tensor]:
    bias = torch.linspace(-1, 1, 37, dtype=torch.float64).requires_grad_()
    weight = case.weight.clone().requires_grad_()
    out = PolicyLoss(algorithm, 0.8)(LossInputs(case.hidden, case.batch, LMHead(weight, bias, softcap)))
    return out, *torch.autograd.grad(out.loss, (case.hidden, weight, bias))


def vocabulary_parallel(mesh: DeviceMesh) -> None:
    """Rows of the head sharded over the ranks, unevenly: same loss, metrics and gradients as the whole head."""
    group, rank, size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
    bounds = [0, *(37 * (r + 1) // size - r % 2 for r in range(size - 1)), 37]
    mine = slice(bounds[rank], bounds[rank + 1])
    for algorithm in ALGORITHMS:
        for softcap in (None, 3.0):
            case = make_case(1, noise=0.6, temperature=0.8)
            whole, *expected = _whole(case, algorithm, softcap)
            weight = case.weight[mine].clone().requires_grad_()
            bias = torch.linspace(-1, 1, 37, dtype=torch.float64)[mine].clone().requires_grad_()
            head = LMHead(weight, bias, softcap, vocab_start=mine.start, group=group)
            out = PolicyLoss(algorithm, 0.8)(LossInputs(case.hidden, case.batch, head))
            torch.testing.assert_close(out.loss, whole.loss, rtol=1e-12, atol=1e-12)
            got = torch.autograd.grad(out.loss, (case.hidden, weight, bias))
            for g, e in zip(got, (expected[0], expected[1][mine], expected[2][mine]), strict=True):
                torch.testing.assert_close(g, e, rtol=1e-10, atol=1e-12)
            for name, value in whole.metrics.compute().items():
                torch.testing.assert_close(out.metrics.compute()[name], value, rtol=1e-9, atol=1e-12)
    case = make_case(2)
    want = HeadLogProbs(1.0)(LossInputs(case.hidden, case.batch, LMHead(case.weight))).per_token
    head = LMHead(case.weight[mine], vocab_start=mine.start, group=group)
    got = HeadLogProbs(1.0)(LossInputs(case.hidden, case.batch, head)).per_token
    for name, column in want.items():
        torch.testing.assert_close(got[name], column)


class _Model(nn.Module):
    """Hidden states from a body, and the loss inside of the forward pass, where the parameters are whole."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Linear(hidden, hidden, dtype=torch.float64)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=True, dtype=torch.float64)

    def forward(self, states: Tensor, case: Case, loss: PolicyLoss) -> Tensor:
        hidden = self.body(states)
        return loss(LossInputs(hidden, case.batch, LMHead(self.lm_head.weight, self.lm_head.bias))).loss


def fully_sharded(mesh: DeviceMesh) -> None:
    """FSDP2 with one shard of the batch on every rank: summed gradients equal those of one process, the head's included."""
    whole_case = make_case(3, lengths=(9, 5, 14, 3), noise=0.6)
    for algorithm in ALGORITHMS:
        loss = PolicyLoss(algorithm)
        single = _Model(37, 8)
        single(whole_case.hidden.detach(), whole_case, loss).backward()
        model = _Model(37, 8)
        fully_shard(model.body, mesh=mesh)
        fully_shard(model, mesh=mesh)
        batch, first = whole_case.batch, 0
        for r in range(mesh.get_local_rank()):
            first += batch.shard(r, mesh.size()).num_tokens
        shard = batch.shard(mesh.get_local_rank(), mesh.size())
        states = whole_case.hidden.detach()[first : first + shard.num_tokens]
        case = Case(shard, states, whole_case.weight, whole_case.sampler, 1.0)
        model(states, case, loss).backward()
        for (name, p), (_, q) in zip(model.named_parameters(), single.named_parameters(), strict=True):
            summed = p.grad.full_tensor() * mesh.size()
            torch.testing.assert_close(summed, q.grad, rtol=1e-9, atol=1e-10, msg=name)


PLAN = [(check.__name__, ranks, check) for check in (vocabulary_parallel, fully_sharded) for ranks in (2, 4)]
