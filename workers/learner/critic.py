"""The critic: value models as a role over one or more sessions.

Without options it is one session; ``critic.ensemble`` averages several. Targets and advantages are computed in
`rlframe.advantages`, not here.
"""

from __future__ import annotations

import numpy as np

from rlframe.losses.value import ValueLoss, ValuePrediction
from rlframe.metrics import Metrics
from rlframe.sessions import Session
from rlframe.types import Batch
from workers.settings import Config


class Critic:
    """Value models on one rank; every method is called on all ranks together."""

    def __init__(self, sessions: dict[str, Session], config: Config) -> None:
        """``sessions``: the members of the ensemble by name."""
        self.sessions = sessions
        self.micro_batch_tokens = config.actor.micro_batch_tokens
        self.loss = ValueLoss(config.critic.vf_coef, config.critic.clip_range)

    def values(self, shard: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Values [N] before every action token and bootstrap values [B] after the last token, of this rank's shard."""
        values = np.zeros(shard.num_tokens, np.float32)
        bootstrap = np.zeros(len(shard), np.float32)
        share = 1.0 / len(self.sessions)
        for session in self.sessions.values():
            outputs = session.forward(shard, ValuePrediction(), self.micro_batch_tokens)
            values += share * outputs.per_token["values"].cpu().numpy()
            bootstrap += share * outputs.per_trajectory["bootstrap"].cpu().numpy()
        return values, bootstrap

    def update(self, shard: Batch, num_actions: int) -> Metrics:
        """One value step of every member on this rank's shard (``returns`` set).

        ``num_actions``: action tokens of the whole batch.
        """
        parts = []
        for session in self.sessions.values():
            outputs = session.forward_backward(shard, self.loss, self.micro_batch_tokens)
            stats = session.optim_step(1.0 / num_actions)
            for name, value in stats.items():
                outputs.metrics.max(f"critic/{name}", value)
            parts.append(outputs.metrics)
        return Metrics.merge(parts)
