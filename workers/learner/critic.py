"""The critic: value models as a role over one or more sessions.

Without options it is one session. ``critic.ensemble`` averages several; ``critic.per_env`` gives each environment its own.
Targets and advantages are computed in `rlframe.advantages`, not here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rlframe.config import ConfigError
from rlframe.losses.value import ValueLoss, ValuePrediction
from rlframe.metrics import Metrics
from rlframe.sessions import Session
from rlframe.types import Batch
from workers.settings import Config


class Critic:
    """Value models on one rank; every method is called on all ranks together."""

    def __init__(self, sessions: dict[str, Session], config: Config, environments: Sequence[str] = ()) -> None:
        """``sessions``: the members of the ensemble, or one for each of ``environments`` when ``critic.per_env``.

        Raises:
            ConfigError: ``critic.per_env`` and there is not one session for each environment.
        """
        self.sessions = sessions
        self.config = config.critic
        if self.config.per_env and (not environments or len(environments) != len(sessions)):
            raise ConfigError(
                f"critic.per_env=true needs one critic for each environment, but there are {len(sessions)} critics for "
                f"{len(environments)} environments."
            )
        self.environments = dict(zip(sessions, environments, strict=True)) if self.config.per_env else {}
        """Session name -> the environment that it is for, with ``critic.per_env``."""
        self.micro_batch_tokens = config.actor.micro_batch_tokens
        self.loss = ValueLoss(self.config.vf_coef, self.config.clip_range)

    def check(self, batch: Batch) -> None:
        """Refuse a whole batch with a trajectory that no critic is for.

        Raises:
            ValueError: naming the trajectory and its environment.
        """
        if not self.config.per_env:
            return
        for b, env in enumerate(batch.envs):
            if env not in self.environments.values():
                known = ", ".join(self.environments.values())
                raise ValueError(f"{batch.name(b)}: no critic is for its environment {env!r}; critic.per_env=true has {known}.")

    def values(self, shard: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Values [N] before every action token and bootstrap values [B] after the last token, of this rank's shard."""
        values = np.zeros(shard.num_tokens, np.float32)
        bootstrap = np.zeros(len(shard), np.float32)
        for session, which in self._members(shard):
            part = shard.select(which)
            outputs = session.forward(part, ValuePrediction(), self.micro_batch_tokens)
            if "values" not in outputs.per_token:  # no rank has a trajectory for this member
                continue
            share = 1.0 if self.config.per_env else 1.0 / len(self.sessions)
            values[_rows(shard, which)] += share * outputs.per_token["values"].cpu().numpy()
            bootstrap[which] += share * outputs.per_trajectory["bootstrap"].cpu().numpy()
        return values, bootstrap

    def update(self, shard: Batch, num_actions: dict[str, int]) -> Metrics:
        """One value step of every member on this rank's shard (``returns`` set).

        ``num_actions``: action tokens of the whole batch by environment name; a member whose environment is absent rests.
        """
        parts = []
        for session, which in self._members(shard):
            count = num_actions.get(self.environments[session.name], 0) if self.config.per_env else sum(num_actions.values())
            if not count:
                continue
            outputs = session.forward_backward(shard.select(which), self.loss, self.micro_batch_tokens)
            stats = session.optim_step(1.0 / count)
            for name, value in stats.items():
                outputs.metrics.max(f"critic/{name}", value)
            parts.append(outputs.metrics)
        return Metrics.merge(parts)

    def _members(self, shard: Batch) -> Iterator[tuple[Session, np.ndarray]]:
        for name, session in self.sessions.items():
            if self.config.per_env:
                mine = [b for b, env in enumerate(shard.envs) if env == self.environments[name]]
                yield session, np.array(mine, np.int64)
            else:
                yield session, np.arange(len(shard))


def _rows(batch: Batch, which: np.ndarray) -> np.ndarray:
    spans = [np.arange(batch.offsets[b], batch.offsets[b + 1]) for b in which]
    return np.concatenate(spans) if spans else np.zeros(0, np.int64)
