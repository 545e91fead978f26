"""Requests about samplers: sampling sessions, and samples as tasks of their own."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

from trainer.server import paths, wire
from trainer.server.clients import ClientSession, Sampler
from trainer.server.errors import UserError
from trainer.server.futures import Future
from trainer.server.store import Checkpoint
from trainer.server.training import base_names
from workers.engines.adapters import ServedAdapter

if TYPE_CHECKING:
    from trainer.server.service import Service


class SampleRequests:
    """The part of `Service` that samples."""

    def __init__(self, server: Service) -> None:
        self._server = server
        self.tasks: dict[str, asyncio.Task[None]] = {}
        """Samples that are being made, by request id."""
        self._under: dict[str, set[asyncio.Task[None]]] = {}
        """The same by the key of their adapter."""

    def create_sampling_session(self, body: wire.CreateSamplingSession, user: str) -> dict[str, Any]:
        """``create_sampling_session``"""
        session = self._server.clients.get(body.session_id, user)
        saved = None
        if body.model_path is not None:
            saved = self.weights(body.model_path, user)
        elif body.base_model not in base_names(self._server.config):
            raise UserError(
                f"base_model={body.base_model!r} is not served here; this server has {base_names(self._server.config)[0]!r}."
            )
        sampler = self.add(session, body.sampling_session_seq_id, saved, body.base_model)
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    def weights(self, path: str, user: str) -> Checkpoint:
        """Saved adapter of ``user``.

        Raises:
            UserError: there is none, or it is a training state.
        """
        parsed = paths.parse(path)
        if parsed.kind != "sampler_weights":
            raise UserError(f"model_path={path!r} is a training state; samplers take what save_weights_for_sampler saved.")
        return self._server.store.find(parsed, user)

    def add(self, session: ClientSession, number: int, saved: Checkpoint | None, base_model: str | None = None) -> Sampler:
        """The sampler ``number`` of a session, on saved weights or the base model."""
        id = f"{session.id}:sample:{number}"
        if saved is None:
            return self._server.clients.add_sampler(session, Sampler(id, base_model or base_names(self._server.config)[0]))
        adapter = ServedAdapter(saved.key, str(self._server.store.folder(paths.parse(saved.path))))
        return self._server.clients.add_sampler(session, Sampler(id, saved.model.base_model, saved.path, adapter))

    def sample(self, body: wire.SampleRequest, user: str) -> dict[str, Any]:
        """``asample``: a future of samples."""
        if self._server.scheduler.stopping:
            raise UserError("The server is stopping; ask again when it is back.", status=503)
        sampler = self._sampler_of(body, user)
        number = uuid.uuid4().hex[:12] if body.seq_id is None else body.seq_id
        request_id = f"{sampler.id or 'sample'}:{number}"
        ids = [f"{request_id}:{i}" for i in range(max(body.num_samples, 0))]
        if not self._server.futures.known(request_id):
            future = self._server.futures.create(request_id, user)
            task = asyncio.create_task(self._sample(future, sampler, body))
            self.tasks[request_id] = task
            task.add_done_callback(lambda _: self.tasks.pop(request_id, None))
            if sampler.adapter is not None:
                under = self._under.setdefault(sampler.adapter.key, set())
                under.add(task)
                task.add_done_callback(under.discard)
        return {"request_id": request_id, "sample_sequence_ids": ids}

    def _sampler_of(self, body: wire.SampleRequest, user: str) -> Sampler:
        if body.sampling_session_id is not None:
            return self._server.clients.sampler(body.sampling_session_id, user)
        if body.model_path is not None:
            saved = self.weights(body.model_path, user)
            adapter = ServedAdapter(saved.key, str(self._server.store.folder(paths.parse(saved.path))))
            return Sampler("", saved.model.base_model, saved.path, adapter)
        if body.base_model in base_names(self._server.config):
            return Sampler("", str(body.base_model))
        raise UserError(
            f"base_model={body.base_model!r} is not served here; this server has {base_names(self._server.config)[0]!r}."
        )

    async def _sample(self, future: Future, sampler: Sampler, body: wire.SampleRequest) -> None:
        try:
            future.succeed(await self._server.sampling.sample(sampler, body))
        except asyncio.CancelledError:
            future.fail(UserError("The request was cancelled."))
        except Exception as error:
            future.fail(error)

    async def finished(self, key: str) -> None:
        """Return when no sample runs under the adapter ``key``."""
        await asyncio.gather(*self._under.pop(key, ()), return_exceptions=True)

    def cancel(self, request_id: str, user: str) -> None:
        """``cancel_future``: stop sampling for a request that its client gave up; others cannot be stopped."""
        self._server.futures.check(request_id, user)
        if task := self.tasks.get(request_id):
            task.cancel()
