"""Row n of the hidden states predicts token n + 1, against a model that samples by itself (case 8)."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from rlframe import AlgorithmConfig, Batch, LMHead, LogProbs, LossInputs, PolicyLoss, Trajectory
from rlframe.alignment import action_rows, last_rows, trajectory_of
from tests.support.head_logprobs import HeadLogProbs
from tests.support.loss_cases import make_case


def test_producers_stay_within_their_trajectory() -> None:
    batch = make_case(lengths=(1, 4, 2, 9)).batch
    rows, producers = action_rows(batch)
    np.testing.assert_array_equal(rows, np.flatnonzero(batch.action_mask))
    np.testing.assert_array_equal(trajectory_of(batch, rows), trajectory_of(batch, producers))
    np.testing.assert_array_equal(last_rows(batch), [0, 4, 6, 15])


def test_a_trajectory_without_tokens_has_no_last_row() -> None:
    batch = make_case(lengths=(3, 4)).batch
    batch.offsets = np.array([0, 7, 7])
    with pytest.raises(ValueError, match=r"'p1'.*no tokens"):
        last_rows(batch)
    np.testing.assert_array_equal(trajectory_of(batch, np.array([0, 6])), [0, 0])


@pytest.fixture(scope="module")
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def sampled_trajectories(model, temperature: float, k: int) -> Batch:
    """Transformers' own sampling loop with its cache; nothing of the library's forward pass."""
    trajectories = []
    for i, length in enumerate((3, 5, 2)):
        prompt = torch.randint(0, 50, (1, length))
        tokens, cache, logprobs, heads = prompt, None, [], []
        for _ in range(8):
            out = model(tokens if cache is None else tokens[:, -1:], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            log_q = torch.log_softmax(out.logits[0, -1] / temperature, -1)
            token = torch.multinomial(log_q.exp(), 1)
            logprobs.append(float(log_q[token]))
            heads.append(log_q.topk(k))
            tokens = torch.cat([tokens, token[None]], 1)
        pad = np.zeros((length, k))
        trajectories.append(
            Trajectory(
                tokens=tokens[0].numpy(),
                action_mask=np.arange(length + 8) >= length,
                logprobs=[0.0] * length + logprobs,
                head_ids=np.concatenate([pad, [h.indices.numpy() for h in heads]]),
                head_logprobs=np.concatenate([pad, [h.values.numpy() for h in heads]]),
                versions=np.zeros(length + 8),
                rewards=np.zeros(length + 8),
                finish="stop",
                prompt_id=f"p{i}",
                index=i,
            )
        )
    return Batch.from_trajectories(trajectories)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_on_policy_logprobs_agree_and_a_shift_by_one_does_not(model, temperature: float) -> None:
    torch.manual_seed(1)
    batch = sampled_trajectories(model, temperature, k=5)
    hidden = torch.cat([model.model(torch.from_numpy(t.tokens).long()[None]).last_hidden_state[0] for t in batch])
    out = HeadLogProbs(temperature)(LossInputs(hidden, batch, LMHead(model.lm_head.weight)))
    mask = batch.action_mask
    assert np.abs(out.per_token["logprobs"].numpy() - batch.logprobs)[mask].max() < 1e-5
    assert np.abs(out.per_token["head_logprobs"].numpy() - batch.head_logprobs)[mask].max() < 1e-5
    batch.advantages = mask.astype(np.float32)
    metrics = PolicyLoss(AlgorithmConfig(score_centering=True, rollout_is="token"), temperature)(
        LossInputs(hidden, batch, LMHead(model.lm_head.weight))
    ).metrics.compute()
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["actor/sc_coefficient_l1"] < 1e-4
    shifted = LogProbs(temperature)(LossInputs(hidden.roll(1, 0), batch, LMHead(model.lm_head.weight)))
    assert np.abs(shifted.per_token["logprobs"].numpy() - batch.logprobs)[mask].mean() > 0.1


def test_a_batch_travels_as_a_few_flat_arrays() -> None:
    """Case 20: the bytes are in the arrays, and their number does not depend on the tokens."""
    for length in (10, 10_000):
        t = make_case(lengths=(10,)).batch.trajectory(0)
        many = {name: np.resize(getattr(t, name), (length, *getattr(t, name).shape[1:])) for name in ("tokens", "versions")}
        batch = Batch.from_trajectories(
            [
                Trajectory(
                    **many,
                    action_mask=np.zeros(length),
                    logprobs=np.zeros(length),
                    head_ids=np.zeros((length, 4)),
                    head_logprobs=np.zeros((length, 4)),
                    rewards=np.zeros(length),
                    finish="stop",
                )
            ]
        )
        buffers: list[pickle.PickleBuffer] = []
        rest = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
        assert len(buffers) <= 14 and len(rest) < 3000
