"""Rows of several trajectories: every token once, in order, with its own position."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframe.packing import pack


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), width=st.integers(40, 90))
def test_every_token_has_one_cell_and_trajectories_stand_whole_in_one_row(lengths, width):
    lengths = np.array(lengths)
    layout = pack(lengths, width)
    np.testing.assert_array_equal(layout.source.reshape(-1)[layout.cells], np.arange(lengths.sum()))
    assert len(set(layout.cells.tolist())) == lengths.sum()
    for end, length in zip(np.cumsum(lengths), lengths, strict=True):
        cells = layout.cells[end - length : end]
        assert len(set((cells // width).tolist())) == 1
        np.testing.assert_array_equal(np.diff(cells), 1)
        np.testing.assert_array_equal(layout.positions.reshape(-1)[cells], np.arange(length))


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), width=st.integers(40, 90))
def test_padding_is_a_sequence_of_its_own(lengths, width):
    layout = pack(np.array(lengths), width)
    used = np.zeros(layout.source.size, bool)
    used[layout.cells] = True
    for row, taken in zip(layout.positions, used.reshape(layout.source.shape), strict=True):
        np.testing.assert_array_equal(row[~taken], np.arange((~taken).sum()))


def test_equal_short_trajectories_leave_little_padding():
    layout = pack(np.full(128, 11))
    assert layout.source.shape == (12, 128)
