"""Metrics that are the same however a batch is split: sums, counts, moments and extremes travel, division happens once.

No name of a metric lives here, and no formula of an algorithm: only statistics of a set of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

Moments = tuple[float, float, float]
"""(count, mean, sum of squared deviations from that mean)."""


@dataclass
class Metrics:
    """Mergeable statistics; plain Python floats (fp64), so that they travel and add exactly enough.

    Example:
        >>> a, b = Metrics(), Metrics()
        >>> a.mean("x", total=3.0, count=2)
        >>> b.mean("x", total=5.0, count=2)
        >>> Metrics.merge([a, b]).compute()
        {'x': 2.0}
    """

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    """name -> (sum of the values, sum of the weights)."""
    maxima: dict[str, float] = field(default_factory=dict)
    """name -> largest value."""
    minima: dict[str, float] = field(default_factory=dict)
    """name -> smallest value."""
    moments: dict[str, Moments] = field(default_factory=dict)
    """name of a sample -> its `Moments`; a sample is not logged itself, statistics of it are."""
    derived: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    """name -> (statistic, the samples it is computed from)."""

    def mean(self, name: str, total: float, count: float) -> None:
        """Add ``total``, a sum over ``count`` items, to the mean ``name``."""
        old_total, old_count = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (old_total + float(total), old_count + float(count))

    def max(self, name: str, value: float) -> None:
        """Let ``value`` compete for the maximum ``name``."""
        self.maxima[name] = max(float(value), self.maxima.get(name, float(value)))

    def min(self, name: str, value: float) -> None:
        """Let ``value`` compete for the minimum ``name``."""
        self.minima[name] = min(float(value), self.minima.get(name, float(value)))

    def sample(self, name: str, values: ArrayLike) -> None:
        """Add ``values`` (any shape) to the sample ``name``."""
        self.moments[name] = _pool(self.moments.get(name, (0.0, 0.0, 0.0)), _moments_of(values))

    def std(self, name: str, values: ArrayLike) -> None:
        """Log the population standard deviation of ``values`` as ``name``."""
        self.sample(name, values)
        self.derived[name] = ("std", (name,))

    def effective_sample_size(self, name: str, weights: ArrayLike) -> None:
        """Log (sum w)^2 / (n sum w^2) of ``weights`` as ``name``: 1 when all are equal, 1 / n when one carries everything."""
        self.sample(name, weights)
        self.derived[name] = ("effective_sample_size", (name,))

    def explained_variance(self, name: str, predictions: ArrayLike, targets: ArrayLike) -> None:
        """Log how much of the variance of ``targets`` the ``predictions`` explain, in two forms.

        ``name`` is 1 - Var(targets - predictions) / Var(targets), blind to a constant bias; ``name + "_mse"`` is
        1 - E[(targets - predictions)^2] / Var(targets). Constant targets give NaN.
        """
        targets64, predictions64 = np.asarray(targets, np.float64), np.asarray(predictions, np.float64)
        self.sample(f"{name}/targets", targets64)
        self.sample(f"{name}/residuals", targets64 - predictions64)
        samples = (f"{name}/residuals", f"{name}/targets")
        self.derived[name] = ("explained_variance", samples)
        self.derived[f"{name}_mse"] = ("explained_variance_mse", samples)

    @staticmethod
    def merge(parts: Iterable[Metrics]) -> Metrics:
        """The statistics of all parts together."""
        merged = Metrics()
        for part in parts:
            for name, (total, count) in part.sums.items():
                merged.mean(name, total, count)
            for name, value in part.maxima.items():
                merged.max(name, value)
            for name, value in part.minima.items():
                merged.min(name, value)
            for name, moments in part.moments.items():
                merged.moments[name] = _pool(merged.moments.get(name, (0.0, 0.0, 0.0)), moments)
            merged.derived.update(part.derived)
        return merged

    def compute(self) -> dict[str, float]:
        """The numbers to log; a mean over nothing is NaN."""
        means = {name: total / count if count else math.nan for name, (total, count) in self.sums.items()}
        derived = {
            name: _STATISTICS[statistic](*(self.moments[sample] for sample in samples))
            for name, (statistic, samples) in self.derived.items()
        }
        return {**means, **self.maxima, **self.minima, **derived}


def _moments_of(values: ArrayLike) -> Moments:
    """Moments in fp64, shifted by the first value: exact for constants, and free of the cancellation of E[x^2] - E[x]^2."""
    x = np.asarray(values, np.float64).ravel()
    if not x.size:
        return 0.0, 0.0, 0.0
    shifted = x - x[0]
    mean = shifted.mean()
    return float(x.size), float(x[0] + mean), float(np.square(shifted - mean).sum())


def _pool(a: Moments, b: Moments) -> Moments:
    """Moments of two samples together (Chan, Golub and LeVeque 1983): no large squares are ever subtracted."""
    count = a[0] + b[0]
    if not a[0] or not b[0]:
        return b if b[0] else a
    gap = b[1] - a[1]
    return count, a[1] + gap * (b[0] / count), a[2] + b[2] + gap * gap * (a[0] * b[0] / count)


def _std(sample: Moments) -> float:
    return math.sqrt(sample[2] / sample[0]) if sample[0] else math.nan


def _effective_sample_size(weights: Moments) -> float:
    count, mean, squares = weights
    second = mean * mean + squares / count if count else 0.0
    return mean * mean / second if second else math.nan


def _explained_variance(residuals: Moments, targets: Moments) -> float:
    return 1.0 - residuals[2] / targets[2] if targets[2] else math.nan


def _explained_variance_mse(residuals: Moments, targets: Moments) -> float:
    count, mean, squares = residuals
    return 1.0 - (squares + count * mean * mean) / targets[2] if targets[2] else math.nan


_STATISTICS: Mapping[str, Callable[..., float]] = {
    "std": _std,
    "effective_sample_size": _effective_sample_size,
    "explained_variance": _explained_variance,
    "explained_variance_mse": _explained_variance_mse,
}
