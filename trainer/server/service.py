"""One server without HTTP: its parts, its start and stop, sessions, and the periodic sweep.

Requests about models are `trainer.server.model_requests`, those about samplers `trainer.server.sample_requests`. Answers that
take the ranks or the engines are futures; their bodies run in `trainer.server.scheduler` or as tasks of their own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from trainer.server import paths
from trainer.server.auth import Keys
from trainer.server.clients import Clients
from trainer.server.futures import Future, Futures
from trainer.server.model_requests import ModelRequests
from trainer.server.sample_requests import SampleRequests
from trainer.server.sampling import Sampling
from trainer.server.scheduler import Call, Scheduler
from trainer.server.store import EPHEMERAL, EPHEMERAL_KEPT, Checkpoint, ModelInfo, Store
from trainer.server.training import Model, Training, base_names
from trainer.settings.config import Config
from workers.engines.adapters import ServedAdapter
from workers.rollout.sampler import NoSampler, SamplerGroup

logger = logging.getLogger("rlframe.server")


SWEEP_S = 10.0
"""Seconds between sweeps."""


class Service:
    """One server, without HTTP."""

    def __init__(
        self,
        config: Config,
        keys: Keys,
        store: Store,
        training: Training,
        sampling: Sampling,
        samplers: SamplerGroup,
        tokenizer_path: str,
    ) -> None:
        self.config, self.keys, self.store = config, keys, store
        self.training, self.sampling, self.samplers = training, sampling, samplers
        self.tokenizer_path = tokenizer_path
        self.clients = Clients(store)
        self.futures = Futures(config.server.result_ttl_s)
        self.scheduler = Scheduler()
        self.models, self.samples = ModelRequests(self), SampleRequests(self)
        self._background: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the scheduler and the periodic sweep."""
        self._background = [asyncio.create_task(self.scheduler.run()), asyncio.create_task(self._sweep_periodically())]

    async def stop(self) -> None:
        """Run what can still run, save every model, and stop."""
        await self.scheduler.drain()
        await asyncio.gather(*self.samples.tasks.values(), return_exceptions=True)
        for task in self._background:
            task.cancel()
        for model in self.training.models():
            await self.training.sleep(model)

    async def unready(self) -> str | None:
        """Why the server cannot take work now; None if it can."""
        if self.scheduler.stopping:
            return "stopping"
        try:
            await asyncio.wait_for(self.samplers.health(), 30)
        except NoSampler as error:
            return str(error)
        except TimeoutError:
            return "No sampler answers."
        dead = await self.training.dead_ranks()
        return f"rank {dead[0]} of the learner is gone" if dead else None

    def capabilities(self) -> dict[str, Any]:
        """``get_server_capabilities``"""
        context = self.config.rollout.max_model_len
        model = {"model_name": base_names(self.config)[0], "max_context_length": context, "trainable": True, "sampleable": True}
        return {"supported_models": [model]}

    async def finish(self, session_id: str, user: str) -> None:
        """Finish a client's session: weights that it named are kept, its models and unnamed weights are deleted."""
        session = self.clients.get(session_id, user, active=False)
        session.finished = True
        self.clients.save(session)
        for run in self.store.runs(user):
            if run.session == session_id:
                for checkpoint in self._ephemeral(run):
                    await self.delete(checkpoint)
        for model in self.training.models():
            if model.info.session == session_id:
                self.models.unload(model.info.id, user)

    def describe_session(self, session_id: str, user: str) -> dict[str, Any]:
        """``sessions/<id>``"""
        session = self.clients.get(session_id, user, active=False)
        runs = [run.id for run in self.store.runs(user) if run.session == session_id]
        return {
            "training_run_ids": runs,
            "sampler_ids": list(session.samplers),
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
        }

    def last_request(self, run: ModelInfo) -> float:
        """When a run was last asked for, seconds since 1970."""
        return self.training.last_used(run.id) or self.store.written(run)

    async def delete(self, checkpoint: Checkpoint) -> None:
        """Remove saved weights, from samplers' memory too; sampling sessions on them end, samples on their way finish first."""
        self.store.hide(checkpoint)
        for session in self.clients.of(checkpoint.model.user):
            gone = [id for id, s in session.samplers.items() if s.adapter and s.adapter.key == checkpoint.key]
            for id in gone:
                del session.samplers[id]
            if gone:
                self.clients.save(session)
        await self.samples.finished(checkpoint.key)
        await self.samplers.forget(ServedAdapter(checkpoint.key, ""))
        self.store.delete(checkpoint)

    async def prune(self, run: ModelInfo) -> None:
        """Keep the newest of the sampler weights that the client did not name."""
        for checkpoint in self._ephemeral(run)[:-EPHEMERAL_KEPT]:
            await self.delete(checkpoint)

    def _ephemeral(self, run: ModelInfo) -> list[Checkpoint]:
        return [c for c in self.store.checkpoints(run) if paths.parse(c.path).name.startswith(EPHEMERAL)]

    def _sleep_soon(self, model: Model) -> None:
        async def sleep(_: list[Any]) -> list[dict[str, Any]]:
            for call in model.line.waiting.values():  # for a call that its client never sent
                for future in call.futures:
                    self.futures.drop(future)
            model.line.waiting.clear()
            await self.training.sleep(model)
            return [{}]

        if model.awake and not model.line.ready:
            self.scheduler.submit(model.line, Call("sleep", [Future("sleep", "")], sleep, [None]), None)

    async def _sweep_periodically(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_S, self.config.server.idle_timeout_s / 2))
            try:
                await self.sweep()
            except Exception:
                logger.exception("the periodic sweep failed")

    async def sweep(self) -> None:
        """Forget old results, put idle models to sleep, delete expired weights."""
        self.futures.sweep()
        now, limit = time.monotonic(), self.config.server.idle_timeout_s
        for model in self.training.models():
            session = self.clients.by_id(model.info.session)
            if now - max(model.used, session.seen if session else 0.0) > limit and not self.scheduler.stopping:
                self._sleep_soon(model)
        for checkpoint in self.store.expired():
            await self.delete(checkpoint)
