"""The one shift between tokens and logits.

Row n of the hidden states is the state *after* token n, so it predicts token n + 1 of the same trajectory. Per-token
arrays are the other way round: row t describes token t. Convert between the two here only.
"""

from __future__ import annotations

import numpy as np

from rlframe.columns import TokenBatch
from rlframe.types import Batch


def action_rows(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the action tokens and rows of the hidden states that produced them.

    Args:
        batch: N tokens of which A are actions.

    Returns:
        ``rows`` int64[A], ascending, and ``producers`` int64[A] with ``producers = rows - 1``; both index arrays of N rows.

    Raises:
        ValueError: the first token of a trajectory is an action: nothing in this trajectory produced it.
    """
    rows = np.flatnonzero(batch.action_mask)
    starts = batch.offsets[:-1][batch.lengths > 0]
    orphans = starts[batch.action_mask[starts]]
    if len(orphans):
        b = int(trajectory_of(batch, orphans[:1])[0])
        raise ValueError(f"{batch.name(b)}: its first token is an action, but no earlier token produced it.")
    return rows, rows - 1


def trajectory_of(batch: TokenBatch, rows: np.ndarray) -> np.ndarray:
    """int64[len(rows)], the trajectory that each row belongs to."""
    return np.searchsorted(batch.offsets, rows, side="right") - 1


def last_rows(batch: TokenBatch) -> np.ndarray:
    """int64[B], row of the last token of every trajectory: the state a cut episode is bootstrapped from.

    Raises:
        ValueError: a trajectory has no tokens.
    """
    empty = np.flatnonzero(batch.lengths == 0)
    if len(empty):
        raise ValueError(f"{batch.name(int(empty[0]))}: it has no tokens.")
    return batch.offsets[1:] - 1
