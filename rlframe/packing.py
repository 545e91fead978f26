"""How a micro-batch of whole trajectories is laid out for the model: several to a row, next to no padding.

One long row would be padding-free, but attention kernels without a notion of several sequences (sdpa, eager) compute every
pair of its tokens: N^2 for N tokens, although trajectories never attend to each other. Rows of about the longest trajectory
cost N * width. Only indices are computed here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MIN_WIDTH = 128
"""Narrower rows would make matrices too small to be fast; attention among 128 tokens costs next to nothing."""


@dataclass
class Layout:
    """Where each of N tokens stands in a rectangle of R rows."""

    source: np.ndarray
    """int64[R, W], token index of each cell; padding repeats token 0."""
    positions: np.ndarray
    """int64[R, W], position within the trajectory, from 0; padding counts from 0 as one more sequence."""
    cells: np.ndarray
    """int64[N], flat cell of each token."""


def pack(lengths: np.ndarray, width: int | None = None, context: int | None = None) -> Layout:
    """Fit trajectories of ``lengths`` [B] into rows: the longest first, each into the first row with room.

    Args:
        lengths: tokens of each trajectory, in batch order; their sum is N.
        width: cells of a row; at least the longest trajectory. None: the longest, or `MIN_WIDTH` if that is more; never
            more than N.
        context: positions that the model has, which padding must not exceed either; None: any number.
    """
    total = int(lengths.sum())
    width = width or min(max(int(lengths.max()), min(MIN_WIDTH, context or MIN_WIDTH)), total)
    filled: list[int] = []
    places = np.zeros((len(lengths), 2), np.int64)
    for b in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[b])
        row = next((r for r, used in enumerate(filled) if used + length <= width), len(filled))
        if row == len(filled):
            filled.append(0)
        places[b] = row, filled[row]
        filled[row] += length
    first = places[:, 0] * width + places[:, 1]
    within = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    cells = np.repeat(first, lengths) + within
    source = np.zeros(len(filled) * width, np.int64)
    positions = (np.arange(width) - np.array(filled)[:, None]).reshape(-1)
    source[cells], positions[cells] = np.arange(total), within
    return Layout(source.reshape(-1, width), positions.reshape(-1, width), cells)
