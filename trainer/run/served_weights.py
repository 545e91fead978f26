"""Checks that the engines serve the actor's weights: a checksum covers what they hold, a probe what they compute with."""

from __future__ import annotations

import numpy as np

from rlframe.types import Batch, Trajectory
from workers.engines.protocol import Completion
from workers.learner.group import LearnerGroup


def checksum_fault(served: dict[int, str], expected: str, version: int) -> str | None:
    """One sentence about the first worker (``served``: checksum by worker) whose checksum is not the actor's, or None."""
    for i, checksum in served.items():
        if checksum != expected:
            return (
                f"Rollout worker {i} serves weights with checksum {checksum} after the sync of version {version}, "
                f"but the actor's are {expected}."
            )
    return None


async def probe_fault(
    completions: dict[int, Completion], prompt: np.ndarray, learner: LearnerGroup, temperature: float, tolerance: float
) -> str | None:
    """One sentence about the first worker whose log-probabilities differ from the actor's by more than ``tolerance``, or None.

    Args:
        completions: by worker, sampled from ``prompt`` (int32[P]) at ``temperature``.
        prompt: the fixed prompt.
        learner: where the actor is.
        temperature: divides the actor's logits.
        tolerance: nats.
    """
    if not completions:
        return None
    batch = Batch.from_trajectories([_as_trajectory(prompt, completion) for completion in completions.values()])
    ours = (await learner.logprobs(learner.put(batch), temperature))["logprobs"]
    differences = np.where(batch.action_mask, np.abs(ours - batch.logprobs), 0.0)
    for i, worst in zip(completions, np.maximum.reduceat(differences, batch.offsets[:-1]), strict=True):
        if not worst <= tolerance:
            return (
                f"Rollout worker {i} differs from the actor by {worst:.2g} nats on the probe prompt; "
                f"if its dtype is lower than the actor's, raise rollout.probe_tolerance."
            )
    return None


def _as_trajectory(prompt: np.ndarray, completion: Completion) -> Trajectory:
    length = len(prompt) + len(completion.ids)

    def behind_prompt(rows: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros((len(prompt), *rows.shape[1:]), rows.dtype), rows])

    return Trajectory(
        tokens=np.concatenate([prompt, completion.ids]),
        action_mask=np.arange(length) >= len(prompt),
        logprobs=behind_prompt(completion.logprobs),
        head_ids=behind_prompt(completion.head_ids),
        head_logprobs=behind_prompt(completion.head_logprobs),
        versions=behind_prompt(completion.versions),
        rewards=np.zeros(length),
        finish="length",
        prompt_id="probe",
    )
