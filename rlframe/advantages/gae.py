"""Skip-observation GAE: advantages from the values of a critic, which come from `rlframe.losses.value`."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from rlframe.advantages.base import Estimator
from rlframe.config import AlgorithmConfig
from rlframe.types import Batch
from rlframe.validation import check_finite, check_rows

_GROUP_TOKENS = 2**17
"""Tokens that are processed together: an array of so many doubles takes 1 MiB."""
_LARGEST_EXPONENT = 500.0
"""exp(500) = 1e217 leaves room for large rewards below the largest double, 1e308."""


class GAE(Estimator):
    """Advantages with ``lambda_policy``, and returns = advantages with ``lambda_critic`` + values."""

    needs_critic = True
    settings = ("gamma", "lambda_critic", "lambda_policy", "lambda_alpha")

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self.algorithm = algorithm

    def __call__(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """GAE with separate lambdas for policy and returns; needs ``values``, and ``bootstrap`` for cut trajectories."""
        algorithm, rows = self.algorithm, np.flatnonzero(batch.action_mask)
        lam: float | np.ndarray
        if algorithm.lambda_policy == "adaptive":
            sampled = np.diff(np.searchsorted(rows, batch.offsets)) + batch.columns.get("actions_before", 0)
            lam = adaptive_lambda(sampled, algorithm.lambda_alpha)
        else:
            lam = float(algorithm.lambda_policy)
        advantages = skip_observation_gae(batch, algorithm.gamma, lam)
        returns = skip_observation_gae(batch, algorithm.gamma, algorithm.lambda_critic)
        returns[rows] += batch.values[rows]  # type: ignore[index]
        return advantages, returns


def adaptive_lambda(lengths: np.ndarray, alpha: float) -> np.ndarray:
    """1 - 1 / (alpha l), clamped to [0, 1], for trajectories with l action tokens (VAPO, arXiv 2504.05118, section 4).

    Longer answers get a lambda nearer 1, so that the reward at their end still reaches their beginning.

    Args:
        lengths: int[B], action tokens of the episode so far, those of earlier pieces included; 0 is legal and gives 0.
        alpha: positive.

    Returns:
        float64[B]
    """
    return np.clip(1 - 1 / (alpha * np.maximum(lengths, 1e-9)), 0.0, 1.0)


def skip_observation_gae(batch: Batch, gamma: float, lam: float | np.ndarray) -> np.ndarray:
    """Generalised advantage estimation over the subsequence of action tokens (SAO, arXiv 2607.07508, equations 4 and 5).

    Observations are context, not positions: the successor of the last token of an action is the first token of the next one.
    A trajectory cut by a budget (``finish`` is ``length``) is bootstrapped from ``batch.bootstrap``, others from 0.

    Args:
        batch: with ``values`` and, if a trajectory was cut, ``bootstrap``.
        gamma: discount per action token.
        lam: lambda, a number or float[B].

    Returns:
        float32[N], 0 off the mask.

    Raises:
        ValueError: values are missing, of the wrong shape or not finite on an action token, or a bootstrap is.
    """
    check_rows(batch, batch.num_tokens, "values", "rewards")
    check_finite(batch, "values", "rewards")
    offsets, final = batch.offsets, _final_values(batch)
    decay = np.broadcast_to(gamma * np.asarray(lam, np.float64), (len(batch),))
    advantages = np.zeros(batch.num_tokens, np.float32)
    # Groups of trajectories whose arrays fit the cache through all steps: half the time of steps over the whole batch.
    borders = np.unique(np.append(np.searchsorted(offsets, np.arange(0, offsets[-1], _GROUP_TOKENS)), len(batch)))
    for first, last in pairwise(borders.tolist()):
        rows = slice(offsets[first], offsets[last])
        _gae(
            advantages[rows],
            batch.action_mask[rows],
            batch.values[rows],  # type: ignore[index]
            batch.rewards[rows],
            offsets[first : last + 1] - offsets[first],
            final[first:last],
            gamma,
            decay[first:last],
        )
    return advantages


def _gae(
    out: np.ndarray,
    mask: np.ndarray,
    values: np.ndarray,
    rewards: np.ndarray,
    offsets: np.ndarray,
    final: np.ndarray,
    gamma: float,
    decay: np.ndarray,
) -> None:
    """Write the advantages of some trajectories into ``out``, in its precision."""
    rows = np.flatnonzero(mask)
    bounds = np.searchsorted(rows, offsets)
    v = values[rows]
    # delta_t = r_t + gamma V_{t+1} - V_t, where the last action token is followed by the final value.
    deltas = np.empty(len(rows))
    np.multiply(v[1:], gamma, out=deltas[:-1])
    acting = bounds[1:] > bounds[:-1]
    deltas[bounds[1:][acting] - 1] = gamma * final[acting]
    deltas -= v
    np.add.at(deltas, *action_rewards(rewards, offsets, rows))
    discounted_sums(deltas, np.diff(bounds), decay)
    out[rows] = deltas


def action_rewards(rewards: np.ndarray, offsets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rewards of some trajectories on their action tokens.

    A reward on an observation goes to the last action token before it, or, before the first action, to that first one; a
    trajectory without action tokens has nowhere to put its rewards.

    Args:
        rewards: float32[N]
        offsets: int64[B + 1], first row of every trajectory, then N.
        rows: int64[A], rows of the action tokens.

    Returns:
        ``positions`` int64[P] in ``rows`` and ``amounts`` float64[P]; a position may come more than once.
    """
    paid = np.flatnonzero(rewards != 0)
    owner = np.searchsorted(offsets, paid, side="right") - 1
    bounds = np.searchsorted(rows, offsets)
    first, last = bounds[owner], bounds[owner + 1] - 1
    positions = np.clip(np.searchsorted(rows, paid, side="right") - 1, first, last)
    kept = last >= first
    return positions[kept], rewards[paid[kept]].astype(np.float64)


def discounted_sums(deltas: np.ndarray, lengths: np.ndarray, decay: np.ndarray) -> None:
    """Replace delta_t by x_t = delta_t + decay x_{t+1} within each of B consecutive runs, x being 0 after the end of a run.

    numpy's cumulative sum does the scan, one call per run: counting k from the end, x_k = decay^k sum_{j<=k} decay^-j delta_j;
    the terms grow with j, so rounding stays relative to the latest ones and the result is as exact as the recurrence.

    Args:
        deltas: float64[A], the runs one after the other; overwritten.
        lengths: int[B], their lengths, with sum A.
        decay: float64[B], gamma lambda, in [0, 1].
    """
    longest = int(lengths.max(initial=0))
    age, growth, sums = np.arange(longest, dtype=np.float64), np.empty(longest), np.empty(longest)
    # decay 0 becomes a rate so large that every piece below has one token.
    rates = -np.log(np.maximum(decay, np.finfo(np.float64).tiny))
    end = 0
    for length, rate in zip(lengths.tolist(), rates.tolist(), strict=True):
        end += length
        run = deltas[end - length : end][::-1]
        size = max(1, length if length * rate <= _LARGEST_EXPONENT else int(_LARGEST_EXPONENT / rate))
        for first in range(0, length, size):
            x = run[first : first + size]
            if not rate:
                np.add.accumulate(x, out=x)
                continue
            if first:
                x[0] += run[first - 1] * math.exp(-rate)
            g, s = growth[: len(x)], sums[: len(x)]
            np.exp(np.multiply(age[: len(x)], rate, out=g), out=g)
            np.add.accumulate(np.multiply(x, g, out=s), out=s)
            np.divide(s, g, out=x)


def _final_values(batch: Batch) -> np.ndarray:
    """float64[B], V after the last token where a budget cut the trajectory, 0 where it ended."""
    cut = np.array([reason == "length" for reason in batch.finish], dtype=bool)
    if not cut.any():
        return np.zeros(len(batch))
    if batch.bootstrap is None or batch.bootstrap.shape != (len(batch),):
        raise ValueError(
            f"{batch.name(int(np.argmax(cut)))}: it was cut (finish is length), but the batch has no bootstrap values."
        )
    bad = cut & ~np.isfinite(batch.bootstrap)
    if bad.any():
        raise ValueError(f"{batch.name(int(np.argmax(bad)))}: bootstrap is not finite.")
    return np.where(cut, batch.bootstrap, 0.0).astype(np.float64)
