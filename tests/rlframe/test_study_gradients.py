"""The gradients that examples/head_size compares, against autograd and closed forms on small vocabularies."""

from __future__ import annotations

import pytest
import torch

from examples.head_size import gradients, run
from examples.values.common import random_backbone
from rlframe.config import LoraConfig
from rlframe.sessions import SessionSpec
from tests.support.loss_cases import make_case

VOCABULARY = 11


def distributions(noise: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of the trainer, log-probabilities of a sampler near it, and tokens."""
    generator = torch.Generator().manual_seed(0)
    z = 2 * torch.randn(6, VOCABULARY, generator=generator, dtype=torch.float64)
    log_q = torch.log_softmax(z + noise * torch.randn(z.shape, generator=generator, dtype=torch.float64), 1)
    return z, log_q, torch.multinomial(log_q.exp(), 1, generator=generator).squeeze(1)


@pytest.mark.parametrize("rule", gradients.RULES)
def test_the_exact_gradient_is_that_of_the_centred_loss(rule: str) -> None:
    z, log_q, tokens = distributions()
    z.requires_grad_()
    log_p = torch.log_softmax(z, 1)
    f = gradients.RULES[rule][1]((log_p.detach() - log_q).exp())
    weight = f.gather(1, tokens[:, None]).squeeze(1)
    score = weight * log_p.gather(1, tokens[:, None]).squeeze(1) - (log_q.exp() * f * log_p).sum(1)
    (wanted,) = torch.autograd.grad(-score.sum(), z)
    torch.testing.assert_close(gradients.exact(rule, log_p.detach(), log_q, tokens), wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("rule", gradients.RULES)
def test_centred_gradients_of_a_constant_reward_vanish_on_average(rule: str) -> None:
    """E_q over every token of the vocabulary; without centring the drift is left."""
    z, log_q, _ = distributions(noise=2.5)
    every = torch.arange(VOCABULARY)
    log_p, log_q = torch.log_softmax(z, 1)[:1].expand(VOCABULARY, -1), log_q[:1].expand(VOCABULARY, -1)
    weighted = log_q[0].exp().unsqueeze(1) * gradients.exact(rule, log_p, log_q, every)
    assert weighted.sum(0).abs().max() < 1e-14
    plain = log_q[0].exp().unsqueeze(1) * gradients.from_head(rule, log_p, log_q, every, 0)
    assert plain.sum(0).abs().max() > 0.01


@pytest.mark.parametrize("rule", gradients.RULES)
def test_a_head_over_the_vocabulary_is_exact_and_a_tail_proportional_to_the_trainer_is_no_error(rule: str) -> None:
    z, log_q, tokens = distributions()
    log_p = torch.log_softmax(z, 1)
    wanted = gradients.exact(rule, log_p, log_q, tokens)
    assert gradients.relative_error(gradients.from_head(rule, log_p, log_q, tokens, VOCABULARY), wanted) < 1e-9
    # q = p but for the two likeliest tokens: there the tail is rho p, as the model says.
    top = log_p.topk(2).indices
    tilted = torch.log_softmax(log_p.scatter_add(1, top, torch.tensor([[0.3, 0.6]], dtype=log_p.dtype).expand(6, -1)), 1)
    wanted = gradients.exact(rule, log_p, tilted, tokens)
    assert gradients.relative_error(gradients.from_head(rule, log_p, tilted, tokens, 2), wanted) < 1e-9


def test_sums_over_tokens_do_not_depend_on_how_they_are_cut() -> None:
    z, log_q, tokens = distributions()
    log_p = torch.log_softmax(z, 1)
    whole = run.logit_errors(log_p, log_q, tokens)
    parts = run.added(*(run.logit_errors(log_p[s], log_q[s], tokens[s]) for s in (slice(0, 2), slice(2, 6))))
    assert whole["wrong"]["none"][0] > whole["wrong"]["none"][8] > whole["wrong"]["none"][VOCABULARY]
    for rule in gradients.RULES:
        assert parts["exact"][rule] == pytest.approx(whole["exact"][rule])
        assert parts["wrong"][rule] == pytest.approx(whole["wrong"][rule], abs=1e-12)
    best = log_q.topk(8)
    masses = [float(best.values.exp().sum()), float(log_p.gather(1, best.indices).exp().sum())]
    assert parts["mass"][8] == pytest.approx(masses)


def test_a_whole_head_trains_the_adapter_with_the_exact_gradient() -> None:
    case = make_case(0, vocabulary=VOCABULARY, k=VOCABULARY)
    session = random_backbone(0, VOCABULARY).create_session("actor", SessionSpec(lora=LoraConfig(rank=2)))
    found = gradients.parameter_gradients(session, case.batch, [0, 1, VOCABULARY]).vectors
    for rule in gradients.RULES:
        wanted = found[rule, "exact"]
        assert gradients.relative_error(found[rule, VOCABULARY], wanted) < 1e-4
        assert gradients.relative_error(found[rule, 0], wanted, found[rule, 0]) == pytest.approx(1)
    assert gradients.relative_error(found["none", 1], found["none", "exact"]) > 0.01
