"""A run that always trains on rollouts as late as it may says once what would make them fresher."""

import pytest

from trainer.settings.compose import compose
from trainer.watch.tracking import Lateness


def words(overrides, *means):
    lateness = Lateness(compose(overrides))
    return [step for step, mean in enumerate(means) if lateness.at_bound({"off_policy/mean": mean})], lateness.advice


def test_it_is_said_once_after_ten_steps_in_a_row():
    steps, advice = words(["max_staleness=4", "batch_size=256"], *[4.0] * 9, 3.9, *[4.0] * 40)
    assert steps == [19]
    assert "longest" in advice and "max_staleness=4 versions late" in advice and "reorder_window=512 (at most 1024)" in advice


def test_a_full_buffer_is_told_of_fresh_admission():
    steps, advice = words(["max_staleness=2", "admission=full"], *[2.0] * 40)
    assert steps == [9] and "max_staleness=2 versions late" in advice and "admission=fresh" in advice


@pytest.mark.parametrize(
    "overrides",
    [["max_staleness=0"], ["max_staleness=1"], ["max_staleness=2", "batch_size=16", "reorder_window=32"]],
    ids=["synchronous", "one version is what overlap needs", "no room"],
)
def test_it_is_not_said_where_nothing_can_be_changed(overrides):
    assert words(overrides, *[2.0] * 40)[0] == []


def test_groups_count_as_one_prompt():
    assert "reorder_window=16 (at most 32)" in words(["algorithm=grpo", "max_staleness=2", "batch_size=128"])[1]
