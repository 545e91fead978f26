"""The controller's own numbers, against sums written out by hand."""

import numpy as np

from rlframe.types import Batch, Trajectory
from trainer.metrics import eval_metrics, rollout_metrics, staleness_metrics


def trajectory(mask, rewards, versions, finish="stop", env="a"):
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
    )


BATCH = Batch.from_trajectories(
    [
        trajectory([0, 1, 1], [0, 0, 1.0], [-1, 3, 4]),
        trajectory([0, 0, 1, 0, 1, 1], [0, 0, 0.5, 0, 0, 1.5], [-1, -1, 5, -1, 5, 6], finish="length", env="b"),
    ]
)


def test_rewards_lengths_and_finishes():
    metrics = rollout_metrics(BATCH)
    assert metrics["reward/mean"] == 1.5 and metrics["reward/std"] == 0.5
    assert (metrics["reward/a/mean"], metrics["reward/b/mean"]) == (1.0, 2.0)
    assert (metrics["response_length/mean"], metrics["response_length/max"]) == (2.5, 3.0)
    assert metrics["response_length/clip_ratio"] == metrics["finish/length"] == metrics["finish/stop"] == 0.5


def test_staleness_counts_from_the_oldest_action_token_and_ignores_observations():
    assert staleness_metrics(BATCH, version=6) == {"off_policy/mean": 2.0, "off_policy/max": 3.0}


def test_evaluation_is_named_after_the_task():
    assert eval_metrics(BATCH, "arithmetic")["eval/arithmetic/reward"] == 1.5
