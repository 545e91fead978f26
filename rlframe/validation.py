"""Checks of batches before they are used; every refusal names the trajectory and the field.

Checks of one trajectory live where it is built (`rlframe.types`), checks of the heads in `rlframe.losses.score_centering`.
"""

from __future__ import annotations

import numpy as np

from rlframe.columns import TokenBatch
from rlframe.topk import MASS_TOLERANCE
from rlframe.types import Batch


def check_batch(batch: Batch) -> None:
    """Refuse a whole batch that nothing can be learned from.

    Raises:
        ValueError: no trajectories, or none with an action token.
    """
    if not len(batch):
        raise ValueError("The batch has no trajectories.")
    if not batch.num_actions:
        raise ValueError(f"The batch of {len(batch)} trajectories has no action token: action_mask is False everywhere.")


def check_offsets(batch: TokenBatch) -> None:
    """Refuse offsets that do not cut the rows into trajectories one after the other.

    Raises:
        ValueError: they do not begin at 0, or one is lower than the one before it; the trajectory is named.
    """
    offsets = batch.offsets
    if offsets.ndim != 1 or not len(offsets) or offsets[0] != 0:
        raise ValueError(f"offsets must be a list of rows that begins at 0, not {np.array2string(offsets, threshold=8)}.")
    if (batch.lengths < 0).any():
        b = int(np.argmax(batch.lengths < 0))
        raise ValueError(f"{batch.name(b)}: offsets go down from {offsets[b]} to {offsets[b + 1]}.")


def check_rows(batch: Batch, hidden_rows: int, *learner: str) -> None:
    """Refuse columns that do not have one row per token.

    Raises:
        ValueError: a per-token column or the hidden states have another number of rows, one of ``learner`` is missing, or
            offsets go down.
    """
    check_offsets(batch)
    n = batch.num_tokens
    if hidden_rows != n:
        raise ValueError(f"hidden has {hidden_rows} rows, but the batch has {n} tokens.")
    for name in learner:
        if batch.columns.get(name) is None:
            raise ValueError(f"The batch has no {name}; compute them first.")
    for name, column in batch.declared().items():
        if name not in batch.columns or column.per == "trajectory" or name in batch.extras:
            continue
        shape = batch.columns[name].shape
        if shape != ((n, batch.head_ids.shape[-1]) if column.per == "head" else (n,)):
            raise ValueError(f"{name} has shape {shape}, but the batch has {n} tokens.")


def check_vocabulary(batch: TokenBatch, size: int, *, context: bool = False) -> None:
    """Refuse action tokens, and heads of them, that the output layer does not have; with ``context`` all other tokens, too.

    Raises:
        ValueError: a token, or an entry of a head that is not padded, is outside of [0, size).
    """
    bad = (batch.tokens < 0) | (batch.tokens >= size)
    if not context:
        bad &= batch.columns["action_mask"]
    if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(f"{_at(batch, row)}: tokens has {batch.tokens[row]}, but the vocabulary has {size} entries.")
    ids = batch.columns.get("head_ids")
    if ids is not None and ids.size and not (ids.min() >= 0 and ids.max() < size):
        sampled = (batch.columns["head_logprobs"] != -np.inf) & batch.columns["action_mask"][:, None]
        outside = ((ids < 0) | (ids >= size)) & sampled
        if outside.any():
            row, entry = (int(i) for i in np.argwhere(outside)[0])
            raise ValueError(f"{_at(batch, row)}: head_ids has {ids[row, entry]}, but the vocabulary has {size} entries.")


def check_logprobs(batch: Batch) -> None:
    """Refuse invalid log-probabilities of action tokens.

    Raises:
        ValueError: one is not finite, or above 0 by more than rounding.
    """
    check_finite(batch, "logprobs")
    bad = batch.action_mask & (batch.logprobs > MASS_TOLERANCE)
    if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(f"{_at(batch, row)}: logprobs has the positive value {batch.logprobs[row]:.4g}.")


def check_finite(batch: Batch, *names: str) -> None:
    """Refuse NaN and infinity in fields of one number per token: on action tokens, in ``rewards`` anywhere.

    Raises:
        ValueError: a field has a non-finite value; the first one is named.
    """
    for name in names:
        bad = ~np.isfinite(getattr(batch, name))
        if name != "rewards":
            bad &= batch.action_mask
        if bad.any():
            raise ValueError(f"{_at(batch, int(np.argmax(bad)))}: {name} is not finite.")


def _at(batch: TokenBatch, row: int) -> str:
    """Trajectory and token of a row, for messages."""
    b = int(np.searchsorted(batch.offsets, row, side="right")) - 1
    return f"{batch.name(b)}, token {row - int(batch.offsets[b])}"
