"""What the controller measures itself: rewards, lengths, staleness, where the time of a step goes."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from rlframe.advantages import total_rewards
from rlframe.types import FINISHES, Batch
from workers.environments.base import EXTRAS, FAILURE

MAX_EXTRAS = 32
"""Most names of an environment's own numbers that a step logs; the most frequent ones stay."""


def episode_rewards(batch: Batch) -> np.ndarray:
    """float64[B], total reward of every trajectory's episode, as far as it has come."""
    return total_rewards(batch) + batch.reward_before


def response_lengths(batch: Batch) -> np.ndarray:
    """int64[B], action tokens of every trajectory's episode, as far as it has come."""
    return np.add.reduceat(batch.action_mask.astype(np.int64), batch.offsets[:-1]) + batch.actions_before


def rollout_metrics(batch: Batch) -> dict[str, float]:
    """``reward/*`` (also groups without spread), ``reward_extra/*``, ``response_length/*`` and ``finish/*`` of a batch.

    Of the whole episodes that ended in it. Where some were cut, also ``segments/*``, and nothing else if none ended.
    """
    if batch.piece.any() or not batch.last.all():
        # Without the heads, which may be most of a batch.
        light = batch.with_columns(head_ids=batch.head_ids[:, :0], head_logprobs=batch.head_logprobs[:, :0])
        ended = light.select(np.flatnonzero(batch.last))
        return _segment_metrics(batch) | (_episode_metrics(ended) if len(ended) else {})
    return _episode_metrics(batch)


def _segment_metrics(batch: Batch) -> dict[str, float]:
    pieces = {"segments/pieces": float(batch.piece[batch.last].mean() + 1)} if batch.last.any() else {}
    return pieces | {"segments/continued": float(1 - batch.last.mean())}


def _episode_metrics(batch: Batch) -> dict[str, float]:
    rewards, lengths = episode_rewards(batch), response_lengths(batch)
    envs, finish = np.array(batch.envs), np.array(batch.finish)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        **{f"reward/{env}/mean": float(rewards[envs == env].mean()) for env in sorted(set(batch.envs))},
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/clip_ratio": float((finish == "length").mean()),
        **{f"finish/{reason}": float((finish == reason).mean()) for reason in FINISHES},
        **_group_metrics(rewards, batch.indices),
        **_environment_metrics(batch, "reward/failed", "reward_extra"),
    }


def extra_numbers(metadata: dict[str, Any]) -> dict[str, float]:
    """The finite numbers that an environment gave beside a trajectory's reward."""
    given = metadata.get(EXTRAS)
    numbers = given.items() if isinstance(given, dict) else ()
    read = ((str(name).encode(errors="replace").decode(), _finite(x)) for name, x in numbers)
    return {name: x for name, x in read if x is not None}


def _finite(x: Any) -> float | None:
    """A finite number as a float; None for anything else."""
    try:
        value = float(x) if isinstance(x, int | float | np.number | np.bool_) else math.nan
    except (OverflowError, TypeError):  # an integer that no float holds; a complex number
        return None
    return value if math.isfinite(value) else None


def _environment_metrics(batch: Batch, failed: str, extras: str) -> dict[str, float]:
    """Means of `extra_numbers` over the trajectories that have them; the fraction without a reward, where there are some."""
    values: dict[str, list[float]] = defaultdict(list)
    for metadata in batch.metadata:
        for name, x in extra_numbers(metadata).items():
            values[name].append(x)
    names = sorted(sorted(values), key=lambda name: -len(values[name]))[:MAX_EXTRAS]
    failures = sum(FAILURE in metadata for metadata in batch.metadata)
    return {
        **({failed: failures / len(batch)} if failures else {}),
        **{f"{extras}/{name}/mean": float(np.mean(values[name])) for name in names},
    }


def _group_metrics(rewards: np.ndarray, groups: np.ndarray) -> dict[str, float]:
    """Nothing where every prompt has one trajectory."""
    _, member, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if sizes.max() == 1:
        return {}
    low, high = np.full(len(sizes), np.inf), np.full(len(sizes), -np.inf)
    np.minimum.at(low, member, rewards)
    np.maximum.at(high, member, rewards)
    return {"reward/frac_zero_std": float((low == high).mean())}


def staleness(batch: Batch, version: int) -> np.ndarray:
    """``version`` minus the version that sampled the oldest token, of every trajectory that has a sampled one."""
    versions = np.where(batch.action_mask, batch.versions, np.iinfo(np.int32).max)
    oldest = np.minimum.reduceat(versions, batch.offsets[:-1])
    return version - oldest[oldest != np.iinfo(np.int32).max]


def staleness_metrics(batch: Batch, version: int) -> dict[str, float]:
    """``off_policy/{mean,max}``: `staleness` under the trainer's version at consumption."""
    late = staleness(batch, version)
    return {"off_policy/mean": float(late.mean()), "off_policy/max": float(late.max())} if len(late) else {}


def eval_metrics(batch: Batch, task: str) -> dict[str, float]:
    """``eval/<task>/*`` of a held-out batch: rewards, lengths, and what `rollout_metrics` has of the environment."""
    return {
        f"eval/{task}/reward": float(total_rewards(batch).mean()),
        f"eval/{task}/response_length": float(response_lengths(batch).mean()),
        **_environment_metrics(batch, f"eval/{task}/reward_failed", f"eval/{task}/reward_extra"),
    }


class Timers:
    """Wall-clock seconds of the parts of one step, from its construction to `compute`.

    Args:
        record: takes the name of each part when it ends, and its begin and end, seconds since the epoch.
    """

    def __init__(self, record: Callable[[str, float, float], None] = lambda name, begin, end: None) -> None:
        self.begin, self._record = time.perf_counter(), record
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a part; parts of the same name add up."""
        start, begin = time.perf_counter(), time.time()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            self._record(name, begin, time.time())

    def compute(self, batch: Batch, workers: list[dict[str, Any]]) -> dict[str, float]:
        """``time/*``, ``perf/*`` and ``idle/*``; ``workers``: `RolloutWorker.stats` since the step before."""
        step = time.perf_counter() - self.begin
        busy = [min(w["busy_s"] / step, 1.0) for w in workers]
        return {
            **{f"time/{name}": seconds for name, seconds in self.seconds.items()},
            "time/step": step,
            "perf/tokens_per_s": sum(w["tokens"] for w in workers) / step,
            "perf/accepted_tokens_per_s": batch.num_actions / step,
            "idle/trainer": self.seconds.get("wait_for_batch", 0.0) / step,
            "idle/rollout": 1.0 - float(np.mean(busy)),
        }
