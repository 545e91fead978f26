"""Skip-observation GAE over a whole batch against one pass over the same data in numpy.

    python -m benchmarks.gae [--trajectories 1024] [--tokens 4096] [--rounds 9]

Lengths are uniform up to --tokens, every third trajectory has observations between its actions. numpy does the scan: one
cumulative sum per trajectory, whose arrays stay in the cache. The other ways that need torch and numpy only were slower here: a
loop over time steps, vectorised over the batch, pays for gathering a padded copy; scipy and numba are not dependencies.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from rlframe import AlgorithmConfig, Batch, adaptive_lambda, compute_advantages, make_estimator, skip_observation_gae


def make_batch(trajectories: int, tokens: int) -> Batch:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, tokens + 1, trajectories)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    n = int(offsets[-1])
    mask = np.ones(n, bool)
    for b in range(0, trajectories, 3):
        rows = slice(offsets[b], offsets[b + 1])
        mask[rows] = rng.random(lengths[b]) < 0.8
    mask[offsets[:-1]] = False
    rewards = np.zeros(n, np.float32)
    rewards[offsets[1:] - 1] = 1
    return Batch(
        offsets=offsets,
        tokens=np.zeros(n, np.int32),
        action_mask=mask,
        logprobs=np.zeros(n, np.float32),
        head_ids=np.zeros((n, 0), np.int32),
        head_logprobs=np.zeros((n, 0), np.float32),
        versions=np.zeros(n, np.int32),
        rewards=rewards,
        finish=["stop", "length"] * (trajectories // 2) + ["stop"] * (trajectories % 2),
        prompt_ids=[""] * trajectories,
        indices=np.arange(trajectories),
        envs=[""] * trajectories,
        metadata=[{}] * trajectories,
        values=rng.normal(size=n).astype(np.float32),
        bootstrap=rng.normal(size=trajectories).astype(np.float32),
    )


def milliseconds(work: Callable[[], object], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return 1e3 * best


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, value in (("trajectories", 1024), ("tokens", 4096), ("rounds", 9)):
        parser.add_argument(f"--{option}", type=int, default=value)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    batch = make_batch(args.trajectories, args.tokens)
    estimator = make_estimator(AlgorithmConfig())
    lam = adaptive_lambda(np.diff(np.searchsorted(np.flatnonzero(batch.action_mask), batch.offsets)), 1.5)
    work: dict[str, Callable[[], object]] = {
        "adaptive lambda": lambda: skip_observation_gae(batch, 1.0, lam),
        "lambda 0.95": lambda: skip_observation_gae(batch, 1.0, 0.95),
        "lambda 1": lambda: skip_observation_gae(batch, 1.0, 1.0),
        "both lambdas and returns": lambda: compute_advantages(batch, estimator),
        "one cumulative sum over the data": lambda: np.cumsum(batch.values, dtype=np.float64),
    }
    print(f"{args.trajectories} trajectories, {batch.num_tokens} tokens, {batch.num_actions} action tokens, one core, CPU time")
    times = {name: milliseconds(run, args.rounds) for name, run in work.items()}
    for name, value in times.items():
        print(f"{name:34s} {value:8.1f} ms")
    return times


if __name__ == "__main__":
    main()
