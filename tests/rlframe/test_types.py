"""Batches: cutting and joining loses nothing and mixes nothing up."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframe.types import Batch, Trajectory

FIELDS = ("tokens", "action_mask", "logprobs", "head_ids", "head_logprobs", "versions", "rewards")


def trajectory(index, length, k=2):
    mask = np.arange(length) > 0
    return Trajectory(
        tokens=np.arange(length) + 1000 * (index + 1),
        action_mask=mask,
        logprobs=np.where(mask, -6.0 - index, 0.0),
        head_ids=np.tile(np.arange(k) + 7, (length, 1)),
        head_logprobs=np.full((length, k), -3.0),
        versions=np.where(mask, index, -1),
        rewards=np.full(length, index),
        finish="stop",
        prompt_id=f"p{index}",
        index=index,
        env=f"env{index % 2}",
        metadata={"i": index},
    )


def same(a, b):
    assert (a.prompt_id, a.index, a.env, a.finish, a.metadata) == (b.prompt_id, b.index, b.env, b.finish, b.metadata)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(2, 9), min_size=1, max_size=12), data=st.data())
def test_micro_batches_shards_and_concatenation_keep_every_trajectory(lengths, data):
    whole = [trajectory(i, n) for i, n in enumerate(lengths)]
    batch = Batch.from_trajectories(whole)
    batch.values = np.arange(batch.num_tokens, dtype=np.float32)
    budget = data.draw(st.integers(2, 30))
    micros = batch.micro_batches(budget)
    assert all(m.num_tokens <= budget or len(m) == 1 for m in micros)
    ranks = data.draw(st.integers(1, 4))
    shards = [batch.shard(rank, ranks) for rank in range(ranks)]
    for parts in (micros, shards):
        np.testing.assert_array_equal(np.concatenate([part.values for part in parts]), batch.values)
        for a, b in zip(Batch.concat([part for part in parts if len(part)]), whole, strict=True):
            same(a, b)


def test_selecting_permutes_whole_trajectories_with_their_learner_arrays():
    batch = Batch.from_trajectories([trajectory(i, i + 2) for i in range(4)])
    batch.bootstrap = np.array([0.0, 1.0, 2.0, 3.0], np.float32)
    batch.advantages = batch.tokens.astype(np.float32)
    picked = batch.select([3, 1])
    assert picked.prompt_ids == ["p3", "p1"] and picked.bootstrap.tolist() == [3.0, 1.0]
    np.testing.assert_array_equal(picked.advantages, picked.tokens)
    assert picked.offsets.tolist() == [0, 5, 8]


def test_heads_of_different_widths_do_not_join():
    with pytest.raises(ValueError, match="different widths"):
        Batch.from_trajectories([trajectory(0, 3, k=2), trajectory(1, 3, k=4)])


def test_what_a_batch_has_is_declared_and_what_it_lacks_is_said():
    batch = Batch.from_trajectories([trajectory(i, i + 2) for i in range(3)])
    for name, column in Batch.schema().items():
        if column.dtype is not object and not column.added:
            assert batch.columns[name].dtype == column.dtype, name
    assert batch.values is None and batch.returns is None, "not computed yet"
    batch.values = np.zeros(batch.num_tokens, np.float32)
    assert "values" not in Batch.concat([batch, batch]).columns, "it belongs to one whole batch"
    critic = batch.only(["tokens", "action_mask", "values"])
    with pytest.raises(AttributeError, match="The batch has no logprobs"):
        _ = critic.logprobs
    with pytest.raises(TypeError, match="Batch has no column 'reward'"):
        Batch(batch.offsets, tokens=batch.tokens, reward=batch.rewards)
    np.testing.assert_array_equal(Batch.union([critic, batch.only(["logprobs"])]).select([2]).logprobs, batch.logprobs[5:])


def test_parts_of_a_batch_with_read_only_arrays_may_be_written_into():
    """Arrays that come out of Ray are read-only; a rank's share is its own."""
    batch = Batch.from_trajectories([trajectory(i, i + 2) for i in range(3)])
    for column in batch.columns.values():
        if isinstance(column, np.ndarray):
            column.setflags(write=False)
    for part in (batch.shard(0, 1), *batch.micro_batches(4)):
        assert all(column.flags.writeable for column in part.columns.values() if isinstance(column, np.ndarray))
