"""The protocol of advantage estimators, which run in the controller on whole batches, in numpy."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from rlframe.alignment import trajectory_of
from rlframe.types import Batch
from rlframe.validation import check_batch, check_finite, check_rows


class Estimator(Protocol):
    """Computes advantages and returns from the rewards of a batch and, with a critic, its values.

    Built once per run with the algorithm's settings, ``Estimator(algorithm, **algorithm.advantage_args)``. Subclass it to get
    the defaults, or implement every member.
    """

    needs_critic: bool = False
    """Whether batches come with ``values`` and ``bootstrap``; the run then has critics, trained on the returns."""
    settings: tuple[str, ...] = ()
    """The estimator-specific fields of `AlgorithmConfig` that it reads."""

    def check(self) -> None:
        """Refuse algorithm settings that this estimator cannot work with, before anything starts.

        Raises:
            ConfigError: one sentence that names the settings and what to change.
        """

    def __call__(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Advantages and returns, float32[N] each, 0 off the mask.

        A trajectory that was cut (``finish`` is ``length``) is bootstrapped from ``batch.bootstrap``, V after its last token.
        Ray gives read-only arrays, so nothing may write into the batch's.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """The JSON-like state that a resumed run continues from."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""


def compute_advantages(batch: Batch, estimator: Estimator) -> None:
    """Set ``batch.advantages`` and ``batch.returns``, float32[N], to what the estimator gives.

    Raises:
        ValueError: an empty batch, rewards or values that are missing or not finite, or an estimator whose arrays do not have
            one finite number per action token.
    """
    check_batch(batch)
    check_rows(batch, batch.num_tokens, "rewards")
    check_finite(batch, "rewards")
    given = estimator(batch)
    for name, array in zip(("advantages", "returns"), given, strict=True):
        if np.shape(array) != (batch.num_tokens,):
            raise ValueError(
                f"{type(estimator).__name__} gave {name} of shape {np.shape(array)} for a batch of {batch.num_tokens} tokens."
            )
        setattr(batch, name, np.where(batch.action_mask, array, 0).astype(np.float32, copy=False))
        check_finite(batch, name)


def total_rewards(batch: Batch) -> np.ndarray:
    """float64[B], the sum of all rewards of every trajectory."""
    sums = np.add.reduceat(np.append(batch.rewards, 0.0).astype(np.float64), batch.offsets[:-1])
    return sums * (batch.lengths > 0)


def per_token(batch: Batch, numbers: np.ndarray) -> np.ndarray:
    """float32[N] from one number per trajectory [B]: on all its action tokens, 0 elsewhere."""
    rows = np.flatnonzero(batch.action_mask)
    column = np.zeros(batch.num_tokens, np.float32)
    column[rows] = numbers[trajectory_of(batch, rows)]
    return column
