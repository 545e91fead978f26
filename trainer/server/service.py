"""What the routes call: finds who asks for what, gives each request its id and its place in line, and keeps house.

Answers that take the ranks or the engines are futures; their bodies run in `trainer.server.scheduler` or as tasks of their own.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from rlframe.config import Config, OptimConfig
from trainer.server import paths, wire
from trainer.server.auth import Keys
from trainer.server.clients import Clients, ClientSession, Sampler
from trainer.server.errors import UserError
from trainer.server.futures import Future, Futures
from trainer.server.paths import WeightsPath
from trainer.server.protobuf import read_pass
from trainer.server.sampling import Sampling
from trainer.server.scheduler import Call, Scheduler
from trainer.server.store import Checkpoint, ModelInfo, Store
from trainer.server.training import Model, Training, base_names, fresh_seed
from workers.rollout.adapters import ServedAdapter
from workers.rollout.sampler import SamplerGroup

logger = logging.getLogger("rlframe.server")

EPHEMERAL = "live-"
"""Names of sampler weights that the client did not name."""
EPHEMERAL_KEPT = 32
"""Of these, how many of a model are kept; the SDK never says when it is done with one."""
MIN_TTL_S, MAX_TTL_S = 3600, 10 * 366 * 86400
SWEEP_S = 10.0


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
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._background: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the line of calls and the housekeeping."""
        self._background = [asyncio.create_task(self.scheduler.run()), asyncio.create_task(self._keep_house())]

    async def stop(self) -> None:
        """Run what can still run, save every model, and stop."""
        await self.scheduler.drain()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
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
        except Exception as error:
            return f"a sampler does not answer: {type(error).__name__}"
        dead = await self.training.dead_ranks()
        return f"rank {dead[0]} of the learner is gone" if dead else None

    def capabilities(self) -> dict[str, Any]:
        """``get_server_capabilities``"""
        context = self.config.rollout.max_model_len
        model = {"model_name": base_names(self.config)[0], "max_context_length": context, "trainable": True, "sampleable": True}
        return {"supported_models": [model]}

    # Models

    def create_model(self, body: wire.CreateModel, user: str) -> dict[str, Any]:
        """``create_model``: a future of the model's id."""
        session = self.clients.get(body.session_id, user)
        id = f"{session.id}:train:{body.model_seq_id}"
        lora = body.lora_config or wire.LoraBody()
        patterns = body.frozen_module_patterns or lora.frozen_module_patterns or _patterns(body.user_metadata)
        info = ModelInfo(
            id=id,
            user=user,
            session=session.id,
            base_model=body.base_model,
            rank=lora.rank,
            alpha=self.config.server.lora_alpha,
            seed=fresh_seed(lora.seed),
            train_attn=lora.train_attn,
            train_mlp=lora.train_mlp,
            train_unembed=lora.train_unembed,
            frozen_patterns=patterns,
            user_metadata=body.user_metadata,
        )
        return self._create(info, body.optimizer_config, None, optimizer=False)

    def _create(
        self, info: ModelInfo, optimizer_config: wire.OptimizerBody | None, source: Checkpoint | None, optimizer: bool
    ) -> dict[str, Any]:
        request_id = f"{info.id}:0"
        if self.training.known(info.id) or self.futures.known(request_id) or self._exists(info):
            return {"request_id": request_id, "model_id": info.id}
        future = self.futures.create(request_id, info.user)
        model = self.training.add(info)

        async def create(_: list[Any]) -> list[dict[str, Any]]:
            try:
                if optimizer_config is not None and optimizer_config.type != "adamw":
                    raise UserError(f"optimizer_config.type={optimizer_config.type!r} is not available; choose adamw.")
                await self.training.create(model)
                if source is not None:
                    await self.training.load(model, source, optimizer)
            except Exception:
                await self.training.unload(model)
                raise
            return [{"model_id": info.id, "path": source.path if source else None}]

        self._submit(model, "create_model", future, create, None)
        return {"request_id": request_id, "model_id": info.id}

    def _exists(self, info: ModelInfo) -> bool:
        try:
            return bool(self.training.get(info.id, info.user))
        except UserError:
            return False

    def info(self, model_id: str, user: str) -> dict[str, Any]:
        """``get_info``"""
        info = self.training.get(model_id, user).info
        model = {"arch": "causal_lm", "model_name": info.base_model, "tokenizer_id": self.tokenizer_path}
        return {
            "type": "get_info",
            "model_id": info.id,
            "model_data": model,
            "is_lora": True,
            "lora_rank": info.rank,
            "model_name": info.base_model,
        }

    def unload(self, model_id: str, user: str) -> dict[str, Any]:
        """``unload_model``: the model leaves memory; what it saved stays."""
        model = self.training.get(model_id, user)
        future = self.futures.create(f"{model_id}:unload", user)

        async def unload(_: list[Any]) -> list[dict[str, Any]]:
            await self.training.unload(model)
            return [{"type": "unload_model", "model_id": model_id}]

        self._submit(model, "unload_model", future, unload, None)
        return {"request_id": future.id, "model_id": model_id}

    def forward_backward(self, body: bytes, user: str) -> dict[str, Any]:
        """``forward_backward``: a future of losses and log-probabilities."""
        request = read_pass(body)
        model = self.training.get(request.model_id, user)
        payload = self.training.check_pass(request)
        same_call = (request.loss, request.forward_only, tuple(sorted(request.settings.items())))
        return self._numbered(
            model,
            "forward_backward",
            request.seq_id,
            lambda chunks: self.training.run_pass(model, chunks),
            payload=payload,
            merges=same_call,
        )

    def optim_step(self, body: wire.OptimStep, user: str) -> dict[str, Any]:
        """``optim_step``: a future of its metrics."""
        model = self.training.get(body.model_id, user)

        async def step(_: list[Any]) -> list[dict[str, Any]]:
            return [{"metrics": await self.training.optim_step(model, _optim(body))}]

        return self._numbered(model, "optim_step", body.seq_id, step)

    def save_weights(self, body: wire.SaveWeights, user: str) -> dict[str, Any]:
        """``save_weights``: a future of the path."""
        model = self.training.get(body.model_id, user)

        async def save(_: list[Any]) -> list[dict[str, Any]]:
            name = paths.check_name(body.path or f"step-{model.steps:06d}")
            path = WeightsPath(model.info.id, "weights", name)
            await self.training.save(
                model, path, body.overwrite, expires=expires_at(body.ttl_seconds), user_metadata=body.user_metadata
            )
            return [{"type": "save_weights", "path": str(path)}]

        return self._numbered(model, "save_weights", body.seq_id, save)

    def save_weights_for_sampler(self, body: wire.SaveWeights, user: str) -> dict[str, Any]:
        """``save_weights_for_sampler``: a future of the path, or of a sampling session when no path is given."""
        model = self.training.get(body.model_id, user)
        session = self.clients.get(model.info.session, user)

        async def save(_: list[Any]) -> list[dict[str, Any]]:
            ephemeral = body.path is None
            name = f"{EPHEMERAL}{uuid.uuid4().hex[:12]}" if body.path is None else paths.check_name(body.path)
            path = WeightsPath(model.info.id, "sampler_weights", name)
            saved = await self.training.save(
                model, path, body.overwrite, expires=expires_at(body.ttl_seconds), user_metadata=body.user_metadata
            )
            if not ephemeral:
                return [{"type": "save_weights_for_sampler", "path": str(path)}]
            sampler = self._add_sampler(session, body.sampling_session_seq_id or 0, saved)
            await self._prune(model)
            return [{"type": "save_weights_for_sampler", "sampling_session_id": sampler.id}]

        return self._numbered(model, "save_weights_for_sampler", body.seq_id, save)

    async def _prune(self, model: Model) -> None:
        for checkpoint in self._ephemeral(model.info)[:-EPHEMERAL_KEPT]:
            await self.delete(checkpoint)

    def _ephemeral(self, run: ModelInfo) -> list[Checkpoint]:
        return [c for c in self.store.checkpoints(run) if paths.parse(c.path).name.startswith(EPHEMERAL)]

    def load_weights(self, body: wire.LoadWeights, user: str) -> dict[str, Any]:
        """``load_weights``, into a model or as a new one."""
        if body.session_id is None:
            return self._load_into(body, user)
        session = self.clients.get(body.session_id, user)
        source = self._training_weights(body.path, user)
        saved = source.model
        info = ModelInfo(**{**vars(saved), "id": f"{session.id}:train:{body.model_seq_id or 0}", "session": session.id})
        info.user_metadata = body.user_metadata
        if body.base_model is not None and body.base_model not in base_names(self.config):
            raise UserError(f"base_model={body.base_model!r} is not served here; leave it out.")
        return self._create(info, body.optimizer_config, source, body.optimizer)

    def _load_into(self, body: wire.LoadWeights, user: str) -> dict[str, Any]:
        if body.model_id is None:
            raise UserError("load_weights needs model_id, or session_id and model_seq_id.")
        model = self.training.get(body.model_id, user)

        async def load(_: list[Any]) -> list[dict[str, Any]]:
            await self.training.load(model, self._training_weights(body.path, user), body.optimizer)
            return [{"type": "load_weights", "path": body.path, "model_id": model.info.id}]

        return self._numbered(model, "load_weights", body.seq_id, load)

    def _training_weights(self, path: str, user: str) -> Checkpoint:
        parsed = paths.parse(path)
        if parsed.kind != "weights":
            raise UserError(f"path={path!r} is an adapter for samplers; training goes on from weights that save_state saved.")
        return self.store.find(parsed, user)

    def _numbered(
        self,
        model: Model,
        kind: str,
        seq: int | None,
        run: Callable[[list[Any]], Awaitable[list[Any]]],
        *,
        payload: Any = None,
        merges: Any = None,
    ) -> dict[str, Any]:
        """Answer a numbered request: in its place the first time, with the same future when it is repeated."""
        request_id = f"{model.info.id}:{uuid.uuid4().hex[:12] if seq is None else seq}"
        known = self.futures.known(request_id) or (seq is not None and seq < model.line.next_seq)
        if not known:
            future = self.futures.create(request_id, model.info.user)
            self._submit(model, kind, future, run, seq, payload, merges)
        return {"request_id": request_id, "model_id": model.info.id}

    def _submit(
        self,
        model: Model,
        kind: str,
        future: Future,
        run: Callable[[list[Any]], Awaitable[list[Any]]],
        seq: int | None,
        payload: Any = None,
        merges: Any = None,
    ) -> None:
        try:
            self.scheduler.submit(model.line, Call(kind, [future], run, [payload], merges), seq)
        except UserError:
            self.futures.drop(future)
            raise

    # Samplers

    def create_sampling_session(self, body: wire.CreateSamplingSession, user: str) -> dict[str, Any]:
        """``create_sampling_session``"""
        session = self.clients.get(body.session_id, user)
        saved = None
        if body.model_path is not None:
            saved = self._sampler_weights(body.model_path, user)
        elif body.base_model not in base_names(self.config):
            raise UserError(
                f"base_model={body.base_model!r} is not served here; this server has {base_names(self.config)[0]!r}."
            )
        sampler = self._add_sampler(session, body.sampling_session_seq_id, saved, body.base_model)
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    def _sampler_weights(self, path: str, user: str) -> Checkpoint:
        parsed = paths.parse(path)
        if parsed.kind != "sampler_weights":
            raise UserError(f"model_path={path!r} is a training state; samplers take what save_weights_for_sampler saved.")
        return self.store.find(parsed, user)

    def _add_sampler(
        self, session: ClientSession, number: int, saved: Checkpoint | None, base_model: str | None = None
    ) -> Sampler:
        id = f"{session.id}:sample:{number}"
        if saved is None:
            return self.clients.add_sampler(session, Sampler(id, base_model or base_names(self.config)[0]))
        adapter = ServedAdapter(saved.key, str(self.store.folder(paths.parse(saved.path))))
        return self.clients.add_sampler(session, Sampler(id, saved.model.base_model, saved.path, adapter))

    def sample(self, body: wire.Sample, user: str) -> dict[str, Any]:
        """``asample``: a future of samples."""
        if self.scheduler.stopping:
            raise UserError("The server is stopping; ask again when it is back.", status=503)
        sampler = self._sampler_of(body, user)
        number = uuid.uuid4().hex[:12] if body.seq_id is None else body.seq_id
        request_id = f"{sampler.id or 'sample'}:{number}"
        ids = [f"{request_id}:{i}" for i in range(max(body.num_samples, 0))]
        if not self.futures.known(request_id):
            future = self.futures.create(request_id, user)
            task = asyncio.create_task(self._sample(future, sampler, body))
            self._tasks[request_id] = task
            task.add_done_callback(lambda _: self._tasks.pop(request_id, None))
        return {"request_id": request_id, "sample_sequence_ids": ids}

    def _sampler_of(self, body: wire.Sample, user: str) -> Sampler:
        if body.sampling_session_id is not None:
            return self.clients.sampler(body.sampling_session_id, user)
        if body.model_path is not None:
            saved = self._sampler_weights(body.model_path, user)
            adapter = ServedAdapter(saved.key, str(self.store.folder(paths.parse(saved.path))))
            return Sampler("", saved.model.base_model, saved.path, adapter)
        if body.base_model in base_names(self.config):
            return Sampler("", str(body.base_model))
        raise UserError(f"base_model={body.base_model!r} is not served here; this server has {base_names(self.config)[0]!r}.")

    async def _sample(self, future: Future, sampler: Sampler, body: wire.Sample) -> None:
        try:
            future.succeed(await self.sampling.sample(sampler, body))
        except asyncio.CancelledError:
            future.fail(UserError("The request was cancelled."))
        except Exception as error:
            future.fail(error)

    def cancel(self, request_id: str, user: str) -> None:
        """``cancel_future``: stop sampling for a request that its client gave up; others cannot be stopped."""
        self.futures.check(request_id, user)
        if task := self._tasks.get(request_id):
            task.cancel()

    # Sessions and housekeeping

    async def finish(self, session_id: str, user: str) -> None:
        """A client is done: what it has named stays, its models and what it did not name go."""
        session = self.clients.get(session_id, user, active=False)
        session.finished = True
        self.clients.save(session)
        for run in self.store.runs(user):
            if run.session == session_id:
                for checkpoint in self._ephemeral(run):
                    await self.delete(checkpoint)
        for model in self.training.models():
            if model.info.session == session_id:
                self.unload(model.info.id, user)

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
        """Remove saved weights, from samplers' memory too; sampling sessions on them end."""
        for session in self.clients.of(checkpoint.model.user):
            gone = [id for id, s in session.samplers.items() if s.adapter and s.adapter.key == checkpoint.key]
            for id in gone:
                del session.samplers[id]
            if gone:
                self.clients.save(session)
        await self.samplers.forget(ServedAdapter(checkpoint.key, ""))
        self.store.delete(checkpoint)

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

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_S, self.config.server.idle_timeout_s / 2))
            try:
                await self.sweep()
            except Exception:
                logger.exception("housekeeping failed")

    async def sweep(self) -> None:
        """Forget old results, put idle models to sleep, delete weights whose time is over."""
        self.futures.sweep()
        now, limit = time.monotonic(), self.config.server.idle_timeout_s
        for model in self.training.models():
            session = self.clients.by_id(model.info.session)
            if now - max(model.used, session.seen if session else 0.0) > limit and not self.scheduler.stopping:
                self._sleep_soon(model)
        for checkpoint in self.store.expired():
            await self.delete(checkpoint)


def _optim(body: wire.OptimStep) -> OptimConfig:
    if body.adam_params is None:
        name = (body.optimizer_params or {}).get("type")
        raise UserError(f"optimizer_params.type={name!r} is not available; pass AdamParams.")
    adam = body.adam_params
    for name, good, wanted in (
        ("learning_rate", 0 <= adam.learning_rate < float("inf"), "a number from 0 on"),
        ("beta1", 0 <= adam.beta1 < 1, "at least 0 and below 1"),
        ("beta2", 0 <= adam.beta2 < 1, "at least 0 and below 1"),
        ("eps", 0 <= adam.eps < float("inf"), "a number from 0 on"),
        ("weight_decay", 0 <= adam.weight_decay < float("inf"), "a number from 0 on"),
        ("grad_clip_norm", 0 <= adam.grad_clip_norm < float("inf"), "a number from 0 (no clip) on"),
    ):
        if not good:
            raise UserError(f"adam_params.{name}={getattr(adam, name)} is out of range; it must be {wanted}.")
    return OptimConfig(
        lr=adam.learning_rate,
        betas=[adam.beta1, adam.beta2],
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        max_grad_norm=adam.grad_clip_norm or None,
    )


def expires_at(ttl_seconds: int | None) -> float | None:
    """When something that is to live so long expires, seconds since 1970.

    Raises:
        UserError: the SDK's limits are not kept.
    """
    if ttl_seconds is None:
        return None
    if not MIN_TTL_S <= ttl_seconds <= MAX_TTL_S:
        raise UserError(f"ttl_seconds={ttl_seconds} is out of range; it must be from {MIN_TTL_S} to {MAX_TTL_S}.")
    return time.time() + ttl_seconds


def _patterns(user_metadata: dict[str, Any] | None) -> list[str]:
    """``frozen_module_patterns`` as the official SDK can send them: text, separated by commas."""
    given = (user_metadata or {}).get("frozen_module_patterns", "")
    return [pattern.strip() for pattern in str(given).split(",") if pattern.strip()]
