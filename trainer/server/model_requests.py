"""Requests about models: each finds its model, gets an id and a place in the queue, and defines the work for its turn."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from rlframe.config import OptimConfig
from trainer.server import paths, wire
from trainer.server.errors import UserError
from trainer.server.futures import Future
from trainer.server.paths import WeightsPath
from trainer.server.protobuf import read_pass
from trainer.server.scheduler import Call
from trainer.server.store import EPHEMERAL, Checkpoint, ModelInfo
from trainer.server.training import Model, base_names, fresh_seed

if TYPE_CHECKING:
    from trainer.server.service import Service

MIN_TTL_S, MAX_TTL_S = 3600, 10 * 366 * 86400
"""What the SDK says about the life of saved weights."""


class ModelRequests:
    """The part of `Service` that creates, trains, saves and loads."""

    def __init__(self, server: Service) -> None:
        self._server = server

    def create_model(self, body: wire.CreateModel, user: str) -> dict[str, Any]:
        """``create_model``: a future of the model's id."""
        session = self._server.clients.get(body.session_id, user)
        id = f"{session.id}:train:{body.model_seq_id}"
        lora = body.lora_config or wire.LoraBody()
        patterns = body.frozen_module_patterns or lora.frozen_module_patterns or _patterns(body.user_metadata)
        info = ModelInfo(
            id=id,
            user=user,
            session=session.id,
            base_model=body.base_model,
            rank=lora.rank,
            alpha=self._server.config.server.lora_alpha,
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
        if self._server.training.known(info.id) or self._server.futures.known(request_id) or self._exists(info):
            return {"request_id": request_id, "model_id": info.id}
        future = self._server.futures.create(request_id, info.user)
        model = self._server.training.add(info)

        async def create(_: list[Any]) -> list[dict[str, Any]]:
            try:
                if optimizer_config is not None and optimizer_config.type != "adamw":
                    raise UserError(f"optimizer_config.type={optimizer_config.type!r} is not available; choose adamw.")
                await self._server.training.create(model)
                if source is not None:
                    await self._server.training.load(model, source, optimizer)
            except Exception:
                await self._server.training.unload(model)
                raise
            return [{"model_id": info.id, "path": source.path if source else None}]

        self._submit(model, "create_model", future, create, None)
        return {"request_id": request_id, "model_id": info.id}

    def _exists(self, info: ModelInfo) -> bool:
        try:
            return bool(self._server.training.get(info.id, info.user))
        except UserError:
            return False

    def info(self, model_id: str, user: str) -> dict[str, Any]:
        """``get_info``"""
        info = self._server.training.get(model_id, user).info
        model = {"arch": "causal_lm", "model_name": info.base_model, "tokenizer_id": self._server.tokenizer_path}
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
        model = self._server.training.get(model_id, user)
        future = self._server.futures.create(f"{model_id}:unload", user)

        async def unload(_: list[Any]) -> list[dict[str, Any]]:
            await self._server.training.unload(model)
            return [{"type": "unload_model", "model_id": model_id}]

        self._submit(model, "unload_model", future, unload, None)
        return {"request_id": future.id, "model_id": model_id}

    def forward_backward(self, body: bytes, user: str) -> dict[str, Any]:
        """``forward_backward``: a future of losses and log-probabilities."""
        request = read_pass(body)
        model = self._server.training.get(request.model_id, user)
        payload = self._server.training.check_pass(request)
        same_call = (request.loss, request.forward_only, tuple(sorted(request.settings.items())))
        return self._numbered(
            model,
            "forward_backward",
            request.seq_id,
            lambda chunks: self._server.training.run_pass(model, chunks),
            payload=payload,
            merges=same_call,
        )

    def optim_step(self, body: wire.OptimStep, user: str) -> dict[str, Any]:
        """``optim_step``: a future of its metrics."""
        model = self._server.training.get(body.model_id, user)

        async def step(_: list[Any]) -> list[dict[str, Any]]:
            return [{"metrics": await self._server.training.optim_step(model, _optim(body))}]

        return self._numbered(model, "optim_step", body.seq_id, step)

    def save_weights(self, body: wire.SaveWeights, user: str) -> dict[str, Any]:
        """``save_weights``: a future of the path."""
        model = self._server.training.get(body.model_id, user)

        async def save(_: list[Any]) -> list[dict[str, Any]]:
            name = paths.check_name(body.path or f"step-{model.steps:06d}")
            path = WeightsPath(model.info.id, "weights", name)
            await self._server.training.save(
                model, path, body.overwrite, expires=expires_at(body.ttl_seconds), user_metadata=body.user_metadata
            )
            return [{"type": "save_weights", "path": str(path)}]

        return self._numbered(model, "save_weights", body.seq_id, save)

    def save_weights_for_sampler(self, body: wire.SaveWeights, user: str) -> dict[str, Any]:
        """``save_weights_for_sampler``: a future of the path, or of a sampling session when no path is given."""
        model = self._server.training.get(body.model_id, user)
        session = self._server.clients.get(model.info.session, user)

        async def save(_: list[Any]) -> list[dict[str, Any]]:
            ephemeral = body.path is None
            name = f"{EPHEMERAL}{uuid.uuid4().hex[:12]}" if body.path is None else paths.check_name(body.path)
            path = WeightsPath(model.info.id, "sampler_weights", name)
            saved = await self._server.training.save(
                model, path, body.overwrite, expires=expires_at(body.ttl_seconds), user_metadata=body.user_metadata
            )
            if not ephemeral:
                return [{"type": "save_weights_for_sampler", "path": str(path)}]
            sampler = self._server.samples.add(session, body.sampling_session_seq_id or 0, saved)
            await self._server.prune(model.info)
            return [{"type": "save_weights_for_sampler", "sampling_session_id": sampler.id}]

        return self._numbered(model, "save_weights_for_sampler", body.seq_id, save)

    def load_weights(self, body: wire.LoadWeights, user: str) -> dict[str, Any]:
        """``load_weights``, into a model or as a new one."""
        if body.session_id is None:
            return self._load_into(body, user)
        session = self._server.clients.get(body.session_id, user)
        source = self._training_weights(body.path, user)
        saved = source.model
        info = ModelInfo(**{**vars(saved), "id": f"{session.id}:train:{body.model_seq_id or 0}", "session": session.id})
        info.user_metadata = body.user_metadata
        if body.base_model is not None and body.base_model not in base_names(self._server.config):
            raise UserError(f"base_model={body.base_model!r} is not served here; leave it out.")
        return self._create(info, body.optimizer_config, source, body.optimizer)

    def _load_into(self, body: wire.LoadWeights, user: str) -> dict[str, Any]:
        if body.model_id is None:
            raise UserError("load_weights needs model_id, or session_id and model_seq_id.")
        model = self._server.training.get(body.model_id, user)

        async def load(_: list[Any]) -> list[dict[str, Any]]:
            await self._server.training.load(model, self._training_weights(body.path, user), body.optimizer)
            return [{"type": "load_weights", "path": body.path, "model_id": model.info.id}]

        return self._numbered(model, "load_weights", body.seq_id, load)

    def _training_weights(self, path: str, user: str) -> Checkpoint:
        parsed = paths.parse(path)
        if parsed.kind != "weights":
            raise UserError(f"path={path!r} is an adapter for samplers; training continues from weights that save_state saved.")
        return self._server.store.find(parsed, user)

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
        repeated = self._server.futures.known(request_id)
        if repeated or seq is None or seq >= model.line.next_seq:  # else its result has expired: no second effect either
            future = self._server.futures.create(request_id, model.info.user, kind)
            if not repeated:
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
            self._server.scheduler.submit(model.line, Call(kind, [future], run, [payload], merges), seq)
        except UserError:
            self._server.futures.drop(future)
            raise


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
    """Expiry time of something with this lifetime, seconds since 1970.

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
