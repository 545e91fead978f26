"""Metrics that are the same however a batch is split: sums, counts and extremes travel, division happens once.

No formula of an algorithm lives here, and no metric name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


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
        return merged

    def compute(self) -> dict[str, float]:
        """The numbers to log; a mean over nothing is NaN."""
        means = {name: total / count if count else float("nan") for name, (total, count) in self.sums.items()}
        return {**means, **self.maxima, **self.minima}
