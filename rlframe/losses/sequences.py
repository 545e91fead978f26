"""Sums and means over the action tokens of each trajectory, for losses and corrections of whole trajectories."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """Which trajectory each of A action tokens belongs to."""

    segments: Tensor
    """int64[A], in [0, count)."""
    count: int
    """Trajectories; one may have no action token."""

    @property
    def lengths(self) -> Tensor:
        """int64[count], action tokens of each."""
        return torch.bincount(self.segments, minlength=self.count)

    def sum(self, values: Tensor) -> Tensor:
        """[count], sums of values [A], added in float64: one by one in fp32, 300k terms would be off by half a percent."""
        return self._total(values).to(values.dtype)

    def mean(self, values: Tensor) -> Tensor:
        """[count], means of values [A]; 0 for a trajectory without action tokens."""
        return (self._total(values) / self.lengths.clamp(min=1)).to(values.dtype)

    def max(self, values: Tensor) -> Tensor:
        """[count], largest of values [A]; 0 for a trajectory without action tokens."""
        return values.new_zeros(self.count).scatter_reduce(0, self.segments, values, "amax", include_self=False)

    def spread(self, values: Tensor) -> Tensor:
        """[A], what each token's trajectory has in values [count]."""
        return values[self.segments]

    def _total(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.count, dtype=torch.float64).index_add(0, self.segments, values.double())
