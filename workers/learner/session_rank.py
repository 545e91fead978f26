"""A learner rank that hosts sessions by name instead of the roles of a run: what the HTTP server drives.

Methods mirror `rlframe.sessions`. The server (`trainer.server`) keeps track of who owns a session and orders the calls. Every
rank is called with the same arguments in the same order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlframe.config import OptimConfig
from rlframe.losses.targets import Targets, make_loss
from rlframe.sessions import Session, SessionSpec
from workers.learner.group import LearnerGroup
from workers.learner.rank import LearnerRank


class SessionRank(LearnerRank):
    """Ray actor: one rank with one frozen backbone and any number of LoRA sessions on it."""

    def start(self, address: str) -> None:
        """Join the process group and load the base model."""
        self.join(address)
        self.backbone = self._backbone(trainable=False)

    def linear_modules(self) -> dict[str, list[str]]:
        """Paths of the base model's linear layers: ``attn``, ``mlp`` and ``unembed`` (empty where it is tied)."""
        return self.backbone.adapters.linear_modules()

    def create_session(self, name: str, spec: SessionSpec) -> None:
        """Add a session; a `ConfigError` leaves nothing behind. Patterns may name a value head that it gets later."""
        later = [pattern for pattern in spec.frozen_patterns if pattern.startswith("value_head")]
        spec.frozen_patterns = [pattern for pattern in spec.frozen_patterns if pattern not in later]
        self.backbone.create_session(name, spec)
        spec.frozen_patterns += later

    def delete_session(self, name: str) -> None:
        """Remove a session and its memory."""
        self.backbone.delete_session(name)

    def add_value_head(self, name: str) -> None:
        """Give a session a value head, which then trains with it."""
        self._session(name).add_value_head()

    def session_pass(
        self, name: str, batch: Targets, loss: str, settings: dict[str, float], train: bool
    ) -> dict[str, np.ndarray]:
        """Forward (and with ``train`` backward) of the data of this rank.

        Returns:
            Arrays by name: per position [n] or [n, K], per datum [b]; the part of this rank's data, in their order.
        """
        session = self._session(name)
        run = session.forward_backward if train else session.forward
        shard = batch.shard(self.rank, self.ranks)
        outputs = run(shard, make_loss(loss, settings), self.config.actor.micro_batch_tokens)
        return {key: tensor.cpu().numpy() for key, tensor in {**outputs.per_token, **outputs.per_trajectory}.items()}

    def session_step(self, name: str, optim: OptimConfig) -> dict[str, float]:
        """One optimiser step under ``optim`` on the sum of the gradients."""
        session = self._session(name)
        session.spec.optim = optim
        return session.optim_step(1.0)

    def save_session(self, name: str, directory: str) -> None:
        """Write weights, moments and value head; see `rlframe.session_io`."""
        self._session(name).save(directory)

    def load_session(self, name: str, directory: str, optimizer: bool) -> None:
        """Restore what `save_session` wrote; without ``optimizer`` the weights alone, with a cold optimiser."""
        session = self._session(name)
        session.load(directory)
        if not optimizer:
            for trainable in session.trainables:
                trainable.forget()
            session.steps = 0

    def export_session(self, name: str, directory: str) -> None:
        """Write a PEFT adapter folder, without the value head."""
        self._session(name).export(directory, merged=False)

    def _session(self, name: str) -> Session:
        return self.backbone.sessions[name]


class SessionGroup(LearnerGroup):
    """The server's side of all ranks; one call at a time, so that every rank sees the same order."""

    rank_class = SessionRank

    async def linear_modules(self) -> dict[str, list[str]]:
        """Names of the linear layers of the base model, from rank 0."""
        return (await self._all("linear_modules"))[0]

    async def call(self, method: str, *args: Any) -> Any:
        """A verb of `SessionRank` on all ranks; what rank 0 returned."""
        return (await self._all(method, *args))[0]

    async def session_pass(
        self, name: str, batch: Targets, loss: str, settings: dict[str, float], train: bool
    ) -> dict[str, np.ndarray]:
        """Run a pass over a batch on all ranks; the arrays cover all data."""
        parts = await self._all("session_pass", name, self.put(batch), loss, settings, train)
        filled = [part for part in parts if any(len(array) for array in part.values())]
        return {key: np.concatenate([part[key] for part in filled]) for key in filled[0]}
