"""Rollout workers that do not do what they should."""

from __future__ import annotations

from workers.rollout.worker import RolloutWorker


class IgnoresNewWeights(RolloutWorker):
    """Keeps serving the first weights that it got."""

    async def update_weights(self, update, *places):
        self.first = getattr(self, "first", None) or update
        return await super().update_weights(self.first, *places)
