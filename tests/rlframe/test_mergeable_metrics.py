"""Sums, extremes and moments that merge to the same numbers in any order and any grouping."""

from __future__ import annotations

import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframe import Metrics


def part(values: np.ndarray) -> Metrics:
    metrics = Metrics()
    if len(values):
        metrics.mean("mean", values.sum(), len(values))
        metrics.max("max", values.max())
        metrics.min("min", values.min())
    metrics.std("std", values)
    metrics.effective_sample_size("ess", np.abs(values))
    metrics.explained_variance("ev", values, 2 * values + 1)
    return metrics


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40), st.data())
def test_any_grouping_gives_the_statistics_of_the_whole(values: list[float], data) -> None:
    x = np.array(values)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(x)), max_size=6)))
    parts = [part(piece) for piece in np.split(data.draw(st.permutations(values)), cuts)]
    nested = Metrics.merge([Metrics.merge(parts[:2]), Metrics.merge(parts[2:])])
    computed = nested.compute()
    scale = max(1.0, np.abs(x).max())
    assert computed["mean"] == pytest.approx(x.mean(), abs=1e-9 * scale)
    assert computed["max"] == x.max() and computed["min"] == x.min()
    assert computed["std"] == pytest.approx(x.std(), abs=1e-7 * scale)
    if np.abs(x).max() > 1e-3:
        assert computed["ess"] == pytest.approx(np.abs(x).sum() ** 2 / (len(x) * (x**2).sum()), rel=1e-9)
    if x.std() > 1e-3:
        assert computed["ev"] == pytest.approx(1 - np.var(x + 1) / np.var(2 * x + 1), rel=1e-6)
        assert computed["ev_mse"] == pytest.approx(1 - np.mean((x + 1) ** 2) / np.var(2 * x + 1), rel=1e-6)


def test_a_statistic_of_nothing_is_nan() -> None:
    metrics = Metrics()
    metrics.mean("mean", 0.0, 0)
    metrics.std("std", [])
    metrics.effective_sample_size("ess", [])
    metrics.explained_variance("ev", [], [])
    assert all(math.isnan(value) for value in metrics.compute().values())


def test_they_travel_as_plain_numbers() -> None:
    metrics = part(np.arange(5.0))
    assert pickle.loads(pickle.dumps(metrics)).compute() == metrics.compute()
    json.dumps(vars(metrics))
