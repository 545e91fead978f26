"""The controller's own numbers, against sums written out by hand."""

import numpy as np

from rlframe.types import Batch, Trajectory
from trainer.watch.step_metrics import eval_metrics, rollout_metrics, staleness_metrics


def trajectory(mask, rewards, versions, finish="stop", env="a", index=0):
    mask = np.array(mask, bool)
    n = len(mask)
    return Trajectory(
        tokens=np.arange(n),
        action_mask=mask,
        logprobs=np.where(mask, -1.0, 0.0),
        head_ids=np.zeros((n, 0)),
        head_logprobs=np.zeros((n, 0)),
        versions=versions,
        rewards=rewards,
        finish=finish,
        env=env,
        index=index,
    )


BATCH = Batch.from_trajectories(
    [
        trajectory([0, 1, 1], [0, 0, 1.0], [-1, 3, 4]),
        trajectory([0, 0, 1, 0, 1, 1], [0, 0, 0.5, 0, 0, 1.5], [-1, -1, 5, -1, 5, 6], finish="length", env="b", index=1),
    ]
)


def test_rewards_lengths_and_finishes():
    metrics = rollout_metrics(BATCH)
    assert metrics["reward/mean"] == 1.5 and metrics["reward/std"] == 0.5
    assert (metrics["reward/a/mean"], metrics["reward/b/mean"]) == (1.0, 2.0)
    assert (metrics["response_length/mean"], metrics["response_length/max"]) == (2.5, 3.0)
    assert metrics["response_length/clip_ratio"] == metrics["finish/length"] == metrics["finish/stop"] == 0.5


def test_groups_without_spread_are_counted_and_single_rollouts_are_no_groups():
    def group(index, *rewards):
        return [trajectory([0, 1, 1], [0, 0, reward], [-1, 3, 4], index=index) for reward in rewards]

    batch = Batch.from_trajectories([*group(7, 1.0, 1.0), *group(2, 0.0, 1.0), *group(9, 0.0, 0.0), *group(4, 0.5)])
    assert rollout_metrics(batch)["reward/frac_zero_std"] == 0.75
    assert "reward/frac_zero_std" not in rollout_metrics(BATCH)


def test_staleness_counts_from_the_oldest_action_token_and_ignores_observations():
    assert staleness_metrics(BATCH, version=6) == {"off_policy/mean": 2.0, "off_policy/max": 3.0}


def test_evaluation_is_named_after_the_task():
    assert eval_metrics(BATCH, "arithmetic")["eval/arithmetic/reward"] == 1.5
