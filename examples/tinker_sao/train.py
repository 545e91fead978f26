"""SAO through the official `tinker` SDK: one rollout per prompt, a critic that is one more training client, K critic updates.

    rlframe serve model=tiny rollout=torch name=tinker_sao     # in another shell
    python examples/tinker_sao/train.py --key-file runs/tinker_sao/api_key

The client needs numpy and tinker alone; the sums and their rewards are made here.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")

import numpy as np
import tinker
from tinker import types

GAMMA, ALPHA, K = 1.0, 1.5, 2
MAX_TOKENS = 4


@dataclass
class Rollout:
    tokens: np.ndarray
    """int[T + 1], the sum and its answer."""
    mask: np.ndarray
    """bool[T], which of ``tokens[1:]`` the policy sampled."""
    logprobs: np.ndarray
    """float[T], the sampler's, 0 off the mask."""
    reward: float
    """1 for the right answer."""

    def datum(self, **inputs: np.ndarray) -> types.Datum:
        columns = {name: np.asarray(column, np.float32) for name, column in inputs.items()}
        return types.Datum(types.ModelInput.from_ints(self.tokens[:-1].tolist()), {"target_tokens": self.tokens[1:], **columns})


def skip_observation_gae(rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, lam: float) -> np.ndarray:
    """Advantages [T] over the action tokens alone; observations are context, not steps (arXiv 2607.07508, eq. 4 and 5)."""
    advantages, after, following = np.zeros(len(mask)), 0.0, 0.0
    for t in reversed(np.flatnonzero(mask)):
        delta = rewards[t] + GAMMA * following - values[t]
        after = delta + GAMMA * lam * after
        advantages[t], following = after, values[t]
    return advantages


def problems() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Sums of four numbers from 0 to 6 with their answers: to train on, and held out."""
    numbers = [(a, b, c, d) for a in range(7) for b in range(7) for c in range(7) for d in range(7)]
    order = np.random.default_rng(1).permutation(len(numbers))
    sums = [("+".join(map(str, numbers[i])) + "=", str(sum(numbers[i]))) for i in order]
    return sums[256:], sums[:256]


def roll_out(sampler: tinker.SamplingClient, tokenizer, tasks: list[tuple[str, str]], temperature: float) -> list[Rollout]:
    params = types.SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature)
    prompts = [tokenizer.encode(text) for text, _ in tasks]
    futures = [sampler.sample(types.ModelInput.from_ints(prompt), 1, params) for prompt in prompts]
    rollouts = []
    for prompt, (_, answer), future in zip(prompts, tasks, futures, strict=True):
        sequence = future.result().sequences[0]
        said = tokenizer.decode(sequence.tokens, skip_special_tokens=True).strip()
        ahead = np.zeros(len(prompt) - 1)
        rollouts.append(
            Rollout(
                tokens=np.array([*prompt, *sequence.tokens]),
                mask=np.concatenate([ahead, np.ones(len(sequence.tokens))]) > 0,
                logprobs=np.concatenate([ahead, sequence.logprobs]),
                reward=float(said == answer and sequence.stop_reason == "stop"),
            )
        )
    return rollouts


def explained_variance(metrics: dict[str, float]) -> float:
    """1 - Var(R - V) / Var(R) from the sums that ``value_loss`` reports."""
    n = metrics["value_count:sum"]
    variance = metrics["return_sq:sum"] / n - (metrics["return_sum:sum"] / n) ** 2
    left = metrics["residual_sq:sum"] / n - (metrics["residual_sum:sum"] / n) ** 2
    return 1 - left / variance if variance else float("nan")


def train_step(policy, critic, rollouts: list[Rollout], lr: float, critic_lr: float) -> dict[str, float]:
    masks = [rollout.mask.astype(np.float32) for rollout in rollouts]
    data = [rollout.datum(weights=mask) for rollout, mask in zip(rollouts, masks, strict=True)]

    # 1. values of the state before every token
    outputs = critic.forward(data, "value_prediction").result().loss_fn_outputs
    values = [output["state_values"].to_numpy() for output in outputs]

    # 2. skip-observation GAE: lambda 1 for the critic's targets, adaptive for the policy
    advantages, returns = [], []
    for rollout, value in zip(rollouts, values, strict=True):
        rewards = np.zeros(len(rollout.mask))
        rewards[np.flatnonzero(rollout.mask)[-1]] = rollout.reward
        returns.append(value + skip_observation_gae(rewards, value, rollout.mask, 1.0))
        lam = float(np.clip(1 - 1 / (ALPHA * rollout.mask.sum()), 0, 1))
        advantages.append(skip_observation_gae(rewards, value, rollout.mask, lam))

    # 3. K critic updates, asked for without waiting
    targets = [r.datum(weights=mask, returns=ret) for r, mask, ret in zip(rollouts, masks, returns, strict=True)]
    passes = []
    for _ in range(K):
        passes.append(critic.forward_backward(targets, "value_loss"))
        critic.optim_step(types.AdamParams(learning_rate=critic_lr))

    # 4. one policy step with double-sided importance sampling, 0.3 below and 5 above
    graded = [
        r.datum(weights=mask, logprobs=r.logprobs, advantages=advantage)
        for r, mask, advantage in zip(rollouts, masks, advantages, strict=True)
    ]
    clip = {"clip_low_threshold": 0.7, "clip_high_threshold": 6.0}
    policy.forward_backward(graded, "dis", clip)
    step = policy.optim_step(types.AdamParams(learning_rate=lr, grad_clip_norm=1.0)).result()
    first = passes[0].result().metrics
    passes[-1].result()
    return {
        "critic/explained_variance": explained_variance(first),
        "critic/value_loss": first["loss:sum"] / first["value_count:sum"],
        "actor/grad_norm": step.metrics["grad_norm"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key-file", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--critic-lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/tinker_sao_client"))
    arguments = parser.parse_args()
    service = tinker.ServiceClient(base_url=arguments.url, api_key=arguments.key_file.read_text().strip())
    policy = service.create_lora_training_client("tiny", rank=16, seed=arguments.seed).result()
    critic = service.create_lora_training_client("tiny", rank=16, seed=arguments.seed + 1).result()
    tokenizer = policy.get_tokenizer()
    tasks, held_out = problems()
    rng = np.random.default_rng(arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "metrics.jsonl").open("w") as log:
        for step in range(arguments.steps + 1):
            began, row = time.perf_counter(), {"step": step}
            sampler = policy.save_weights_and_get_sampling_client().result()
            if step % 10 == 0 or step == arguments.steps:
                answers = roll_out(sampler, tokenizer, held_out, temperature=0.0)
                row["eval/arithmetic/reward"] = float(np.mean([rollout.reward for rollout in answers]))
            if step < arguments.steps:
                chosen = [tasks[i] for i in rng.choice(len(tasks), arguments.batch, replace=False)]
                rollouts = roll_out(sampler, tokenizer, chosen, temperature=1.0)
                row["reward/mean"] = float(np.mean([rollout.reward for rollout in rollouts]))
                row |= train_step(policy, critic, rollouts, arguments.lr, arguments.critic_lr)
            row["time/step"] = time.perf_counter() - began
            log.write(json.dumps(row) + "\n")
            log.flush()
            print("  ".join(f"{name} {value:.3g}" for name, value in row.items()), flush=True)
    print("policy saved as", policy.save_state("final").result().path)
    service.close("success").result()


if __name__ == "__main__":
    main()
