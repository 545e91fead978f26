"""(c) The reward flips: a critic with K = 2 against a running mean, and how many rounds each takes to re-align.

    python -m examples.values.flip [--seeds 0 1 2] [--out runs/values/flip]

A text is a start token and six tokens of sixteen. It pays 1 if its first token, the topic, has an even id; from round 30 on,
if it has an odd one.
Policy and critic are two adapters on one backbone of random weights. Both arms have the same policy loss (REINFORCE without
correction) and learning rate; only the advantage differs. Each is run on two kinds of data:

sampled   the policy's own texts, as in reinforcement learning;
fixed     uniformly random texts, the same in both arms, whatever the policy would write.

The policy is asked how much more log-probability a token of a now rewarded text has than one of the others (``gap``), on
texts that it never trains on. It is aligned where that is positive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from examples.values.common import (
    MICRO_BATCH_TOKENS,
    Row,
    arguments,
    draw,
    explained_variance,
    from_tokens,
    make_session,
    over_seeds,
    random_backbone,
    write,
)
from rlframe.advantages import compute_advantages, make_estimator
from rlframe.advantages.running_mean import RunningMean
from rlframe.alignment import last_rows
from rlframe.config import AlgorithmConfig
from rlframe.losses.base import LossInputs, LossOutputs
from rlframe.losses.logprobs import LogProbs
from rlframe.losses.policy import PolicyLoss
from rlframe.losses.value import ValueLoss, ValuePrediction
from rlframe.sessions import Session
from rlframe.types import Batch

VOCABULARY, START, LENGTH = 16, 0, 6
ROUNDS, FLIP, BATCH, HELD_OUT, K = 60, 30, 64, 128, 2
POLICY_LR, CRITIC_LR = 3e-3, 3e-3
ADVANTAGES = {"critic": "gae", "running mean": "running_mean"}
TRACKED = 0.9
"""A critic has re-tracked where its held-out explained variance (mse form) is above this."""


class NextLogProbs:
    """Forward only: ``next`` [B, V], log-probabilities of what follows each trajectory."""

    needs = "lm_head"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        assert inputs.lm_head is not None
        ends = inputs.hidden[torch.as_tensor(last_rows(inputs.batch))]
        return LossOutputs(None, per_trajectory={"next": torch.log_softmax(ends @ inputs.lm_head.weight.T, -1)})


def written(tokens: np.ndarray) -> Batch:
    """Texts [B, T] of which all but the first token are actions."""
    return Batch.from_trajectories([from_tokens(row, np.arange(len(row)) > 0) for row in tokens])


def random_texts(rng: np.random.Generator, count: int) -> Batch:
    tokens = rng.integers(0, VOCABULARY, (count, 1 + LENGTH))
    tokens[:, 0] = START
    return written(tokens)


def sampled_texts(policy: Session, rng: np.random.Generator, count: int) -> Batch:
    tokens = np.full((count, 1), START)
    for _ in range(LENGTH):
        logprobs = policy.forward(written(tokens), NextLogProbs(), MICRO_BATCH_TOKENS).per_trajectory["next"].double()
        # The largest of log p + Gumbel noise is a sample from p.
        chosen = (logprobs.numpy() + rng.gumbel(size=logprobs.shape)).argmax(-1)
        tokens = np.concatenate([tokens, chosen[:, None]], 1)
    return written(tokens)


def pay(batch: Batch, flipped: bool) -> np.ndarray:
    """Write the reward to the last token of every text; bool[B], which are paid."""
    paid = (batch.tokens[batch.offsets[:-1] + 1] % 2 == 0) != flipped
    batch.rewards[:] = 0
    batch.rewards[batch.offsets[1:] - 1] = paid
    return paid


def measured(policy: Session, critic: Session, held_out: Batch, flipped: bool) -> dict[str, float]:
    """The policy's gap, and how well the critic knows the reward of a text once its topic is there."""
    paid = pay(held_out, flipped)
    logprobs = policy.forward(held_out, LogProbs(), MICRO_BATCH_TOKENS).per_token["logprobs"].numpy()
    each = logprobs.reshape(HELD_OUT, -1)[:, 1:].mean(1)
    targets = np.repeat(paid.astype(float), held_out.lengths)
    after_topic = np.tile(np.arange(1 + LENGTH) > 1, HELD_OUT)
    known = explained_variance(critic, held_out, targets, after_topic)
    return {"gap": float(each[paid].mean() - each[~paid].mean()), "critic_ev_mse": known["explained_variance_mse"]}


def run(seed: int, data: str, arm: str, rounds: int = ROUNDS, flip: int = FLIP) -> Iterator[Row]:
    """One arm on one kind of data; a row before every round and after the last."""
    backbone = random_backbone(seed, VOCABULARY)
    policy = make_session(backbone, "policy", POLICY_LR, seed, critic=False)
    critic = make_session(backbone, "critic", CRITIC_LR, seed + 1, critic=True)
    algorithm = AlgorithmConfig(advantage=ADVANTAGES[arm])
    estimator = make_estimator(algorithm)
    rng, held_out = np.random.default_rng([seed, 0]), random_texts(np.random.default_rng([seed, 1]), HELD_OUT)
    for done in range(rounds + 1):
        flipped = done >= flip
        metrics = measured(policy, critic, held_out, flipped)
        batch = random_texts(rng, BATCH) if data == "fixed" else sampled_texts(policy, rng, BATCH)
        metrics["reward"] = float(pay(batch, flipped).mean())
        if arm == "critic":
            outputs = critic.forward(batch, ValuePrediction(), MICRO_BATCH_TOKENS)
            batch.values = outputs.per_token["values"].numpy()
        else:
            del metrics["critic_ev_mse"]
        if isinstance(estimator, RunningMean):
            metrics["baseline"] = estimator.mean
        compute_advantages(batch, estimator)
        assert batch.advantages is not None
        metrics["size_of_advantages"] = float(np.abs(batch.advantages[batch.action_mask]).mean())
        yield Row(f"{arm}, {data}", seed, done, metrics)
        for _ in range(K if arm == "critic" else 0):
            critic.forward_backward(batch, ValueLoss(), MICRO_BATCH_TOKENS)
            critic.optim_step(1 / batch.num_actions)
        policy.forward_backward(batch, PolicyLoss(algorithm), MICRO_BATCH_TOKENS)
        policy.optim_step(1 / batch.num_actions)


def rounds_until(rows: Sequence[Row], arm: str, metric: str, above: float, flip: int = FLIP) -> list[int | None]:
    """For every seed, rounds after the flip until ``metric`` is above a bound; None: never."""
    steps, numbers = over_seeds(rows, arm, metric)
    found: list[int | None] = []
    for column in numbers.T:
        reached = [step - flip for step, value in zip(steps, column, strict=True) if step >= flip and value > above]
        found.append(reached[0] if reached else None)
    return found


def main() -> None:
    options = arguments(__doc__, "flip", seeds=3)
    rows = [
        row for seed in options.seeds for data in ("sampled", "fixed") for arm in ADVANTAGES for row in run(seed, data, arm)
    ]
    write(rows, options.out)
    panels = {
        "reward": "mean reward of the batch",
        "gap": "policy: gap for rewarded texts, nats a token",
        "critic_ev_mse": "critic: held-out explained variance (mse form)",
    }
    draw(rows, panels, options.out / "flip.png", mark=FLIP)
    for arm in dict.fromkeys(row.arm for row in rows):
        steps, gaps = over_seeds(rows, arm, "gap")
        before = gaps[steps.index(FLIP - 1)].round(2).tolist()
        print(f"{arm}: gap before the flip {before}, positive again after {rounds_until(rows, arm, 'gap', 0)} rounds", end="")
        if arm.startswith("critic"):
            print(f", critic above {TRACKED} after {rounds_until(rows, arm, 'critic_ev_mse', TRACKED)}", end="")
        print()


if __name__ == "__main__":
    main()
