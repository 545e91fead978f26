"""rlframe's losses in a plain torch loop: no Ray, no engine, no controller.

    python examples/library_only/train.py [--steps 120] [--algorithm centred | plain | tis | dis] [--sampler-step 0.1]

The task: a prompt of two digits, to be repeated twice; every right digit pays 1/4 at its token. One rollout per prompt. The
sampler is a rounded copy of the policy (weights on a grid of --sampler-step) that is refreshed every other update, so trainer
and sampler never quite agree. A critic gives the advantages.
"""

from __future__ import annotations

import argparse
import copy

import numpy as np
import torch
from torch import Tensor, nn

from rlframe import (
    AlgorithmConfig,
    Batch,
    LMHead,
    LossInputs,
    Metrics,
    PolicyLoss,
    Trajectory,
    ValueLoss,
    ValuePrediction,
    compute_advantages,
    make_estimator,
)

DIGITS, ANSWER, HEAD, CRITIC_UPDATES = 10, 4, 4, 2
ALGORITHMS = {
    "plain": AlgorithmConfig(),
    "centred": AlgorithmConfig(score_centering=True),
    "tis": AlgorithmConfig(rollout_is="token", rollout_is_threshold=2.0),
    "dis": AlgorithmConfig(policy_loss="dis", clip_low=0.3, clip_high=5.0),
}


class Network(nn.Module):
    """Token ids [B, T] to hidden states [B, T, H]: row n is the state after token n."""

    def __init__(self, outputs: int, hidden: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(DIGITS, hidden)
        self.body = nn.GRU(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, outputs, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(self.embedding(tokens))[0]


@torch.no_grad()
def rollouts(sampler: Network, prompts: Tensor, version: int) -> Batch:
    """One answer to each prompt [B, 2], with the sampler's log-probabilities and heads."""
    tokens, kept = prompts, []
    for _ in range(ANSWER):
        log_q = torch.log_softmax(sampler.head(sampler(tokens)[:, -1]), -1)
        token = torch.multinomial(log_q.exp(), 1)
        head = log_q.topk(HEAD)
        kept.append((log_q.gather(1, token), head.indices, head.values))
        tokens = torch.cat([tokens, token], 1)
    logprobs, head_ids, head_logprobs = (torch.stack(column, 1).numpy() for column in zip(*kept, strict=True))
    rewards = ((tokens[:, 2:] == prompts.repeat(1, ANSWER // 2)).float() / ANSWER).numpy()
    answered = np.arange(2 + ANSWER) >= 2

    def behind_prompt(rows: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros((2, *rows.shape[1:]), rows.dtype), rows])

    return Batch.from_trajectories(
        [
            Trajectory(
                tokens=tokens[b].numpy(),
                action_mask=answered,
                logprobs=behind_prompt(logprobs[b, :, 0]),
                head_ids=behind_prompt(head_ids[b]),
                head_logprobs=behind_prompt(head_logprobs[b]),
                versions=np.where(answered, version, -1),
                rewards=behind_prompt(rewards[b]),
                finish="stop",
                index=b,
            )
            for b in range(len(prompts))
        ]
    )


def rounded(policy: Network, step: float) -> Network:
    """What the sampler serves: the policy with its weights on a coarse grid."""
    sampler = copy.deepcopy(policy)
    with torch.no_grad():
        for p in sampler.parameters():
            p.copy_((p / step).round() * step if step else p)
    return sampler


def update(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def train(
    algorithm: AlgorithmConfig, steps: int = 120, batch_size: int = 128, sampler_step: float = 0.1, seed: int = 0
) -> list:
    torch.manual_seed(seed)
    policy, critic = Network(DIGITS), Network(1)
    actor_optimiser = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    critic_optimiser = torch.optim.AdamW(critic.parameters(), lr=3e-3)
    policy_loss, value_loss, value_prediction = PolicyLoss(algorithm), ValueLoss(), ValuePrediction()
    estimator = make_estimator(algorithm)

    def critic_inputs(batch: Batch, tokens: Tensor) -> LossInputs:
        return LossInputs(critic(tokens).flatten(0, 1), batch, value_head=lambda h: critic.head(h).squeeze(-1))

    history = []
    for step in range(steps):
        if step % 2 == 0:
            sampler = rounded(policy, sampler_step)
        batch = rollouts(sampler, torch.randint(0, DIGITS, (batch_size, 2)), version=step)
        tokens = torch.from_numpy(batch.tokens).long().view(batch_size, -1)
        with torch.no_grad():
            batch.values = value_prediction(critic_inputs(batch, tokens)).per_token["values"].numpy()
        compute_advantages(batch, estimator)

        # Losses are sums; the one division is by the number of action tokens.
        for _ in range(CRITIC_UPDATES):
            of_critic = value_loss(critic_inputs(batch, tokens))
            update(critic_optimiser, of_critic.loss / batch.num_actions)
        of_actor = policy_loss(LossInputs(policy(tokens).flatten(0, 1), batch, LMHead(policy.head.weight)))
        update(actor_optimiser, of_actor.loss / batch.num_actions)
        metrics = Metrics.merge([of_critic.metrics, of_actor.metrics]).compute()
        history.append(metrics | {"reward/mean": float(batch.rewards.sum()) / batch_size})
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="centred")
    parser.add_argument("--sampler-step", type=float, default=0.1)
    args = parser.parse_args()
    history = train(ALGORITHMS[args.algorithm], args.steps, sampler_step=args.sampler_step)
    for step, metrics in enumerate(history):
        if step % 20 == 0 or step == len(history) - 1:
            names = ("reward/mean", "actor/entropy", "rollout_corr/k3_kl", "critic/explained_variance")
            print(f"step {step:4d}  " + "  ".join(f"{name} {metrics[name]:.3f}" for name in names))


if __name__ == "__main__":
    main()
