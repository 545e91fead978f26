"""Models of clients: sessions on the ranks, created, trained, saved, put to sleep and woken.

A model in memory is a session of the same name on every rank. One that has been idle for a while lies on disk, and its
next call brings it back. A gradient that no optimiser step has used is not kept over that. `trainer.server.scheduler`
orders the calls.
"""

from __future__ import annotations

import json
import logging
import math
import random
import shutil
import time
from dataclasses import dataclass, field, replace
from typing import Any

from rlframe.config import LoraConfig, OptimConfig
from rlframe.sessions import SessionSpec
from trainer.server import data, paths, store
from trainer.server.errors import UserError, not_found
from trainer.server.protobuf import PassRequest
from trainer.server.scheduler import Line
from trainer.server.store import Checkpoint, ModelInfo, Store
from trainer.settings.config import Config
from workers.learner.session_rank import SessionGroup

logger = logging.getLogger("rlframe.server")


@dataclass
class Model:
    """One model of a client."""

    info: ModelInfo
    line: Line
    awake: bool = False
    """Whether its session is in the ranks' memory."""
    gradient: bool = False
    """Whether there is something for an optimiser step."""
    steps: int = 0
    """Optimiser steps taken."""
    used: float = field(default_factory=time.monotonic)
    """Time of its last use, monotonic seconds."""


class Training:
    """All models. Methods that touch the ranks are run by the scheduler, one at a time."""

    def __init__(
        self, config: Config, group: SessionGroup, disk: Store, limits: data.Limits, linear_modules: dict[str, list[str]]
    ) -> None:
        self._config, self._group, self._store, self._limits = config, group, disk, limits
        self._linear = linear_modules
        self._models: dict[str, Model] = {}
        self.tied = not linear_modules["unembed"]
        """Whether the model ties its LM head, so that ``train_unembed`` has nothing to train."""

    async def dead_ranks(self) -> list[int]:
        """Ranks whose process is gone."""
        return await self._group.dead()

    def get(self, id: str, user: str) -> Model:
        """A model of ``user``, awake or asleep.

        Raises:
            UserError: (404) this user has none of that id.
        """
        model = self._models.get(id)
        if model is None and id not in self._models and (asleep := self._read_asleep(id, user)):
            model = self._models.setdefault(id, asleep)
        if model is None or model.info.user != user:
            raise not_found(f"model {id!r} in training")
        model.used = time.monotonic()
        return model

    def _read_asleep(self, id: str, user: str) -> Model | None:
        folder = self._store.asleep(id)
        if not (folder / "model.json").exists():
            return None
        about = json.loads((folder / "model.json").read_text())
        return Model(self._store.run(id, user), Line(about["next_seq"]), steps=about["steps"])

    def models(self) -> list[Model]:
        """All models that were asked for since the server started."""
        return list(self._models.values())

    def last_used(self, id: str) -> float | None:
        """When a model was last asked for, seconds since 1970; None if not since the server started."""
        model = self._models.get(id)
        return None if model is None else time.time() - (time.monotonic() - model.used)

    def add(self, info: ModelInfo) -> Model:
        """Register a model that is about to be created."""
        self._models[info.id] = Model(info, Line())
        return self._models[info.id]

    def known(self, id: str) -> bool:
        """Whether a model of that id was added."""
        return id in self._models

    async def create(self, model: Model) -> None:
        """Make the session of a new model; after a failure there is no such model.

        Raises:
            UserError, ConfigError: what was asked for cannot be.
        """
        try:
            self._check(model.info)
            await self._make_room(model)
            await self._create_session(model.info)
        except Exception:
            del self._models[model.info.id]
            raise
        model.awake = True
        self._store.save_run(model.info)

    def _check(self, info: ModelInfo) -> None:
        names = base_names(self._config)
        if info.base_model not in names:
            raise UserError(f"base_model={info.base_model!r} is not served here; this server has {names[0]!r}.")
        most = self._config.server.max_rank
        if not 1 <= info.rank <= most:
            raise UserError(f"lora_config.rank is {info.rank}; this server takes 1 to {most} (server.max_rank).")
        if not self._targets(info):
            tied = " (the model ties its LM head to the embedding, so train_unembed has nothing to train)" if self.tied else ""
            raise UserError(f"lora_config trains nothing: train_attn, train_mlp and train_unembed leave no layer{tied}.")

    def _targets(self, info: ModelInfo) -> list[str]:
        """Layers of the adapter: by their last names where that is the same set, as engines and PEFT like them."""
        flags = {"attn": info.train_attn, "mlp": info.train_mlp, "unembed": info.train_unembed}
        chosen = [name for part, wanted in flags.items() if wanted for name in self._linear[part]]
        others = [name for part, wanted in flags.items() if not wanted for name in self._linear[part]]
        last = sorted({name.rpartition(".")[2] for name in chosen})
        return last if not any(name.rpartition(".")[2] in last for name in others) else chosen

    async def _create_session(self, info: ModelInfo) -> None:
        spec = SessionSpec(
            lora=LoraConfig(rank=info.rank, alpha=info.alpha, targets=self._targets(info)),
            frozen_patterns=list(info.frozen_patterns),
            optim=OptimConfig(max_grad_norm=None),
            seed=info.seed,
        )
        await self._group.call("create_session", info.id, spec)
        if info.value_head:
            await self._group.call("add_value_head", info.id)

    async def _make_room(self, but: Model) -> None:
        """Put the least recently used models to sleep, as many as necessary; never one with a gradient."""
        most = self._config.server.max_models
        awake = [model for model in self._models.values() if model.awake and model is not but]
        idle = sorted((model for model in awake if not model.gradient), key=lambda model: model.used)
        surplus = max(0, len(awake) + 1 - most)
        if surplus > len(idle):
            raise UserError(f"All {most} models that this server holds (server.max_models) wait for an optim_step; try again.")
        for model in idle[:surplus]:
            await self.sleep(model)

    async def wake(self, model: Model) -> None:
        """Bring a model back into memory if it sleeps.

        Raises:
            UserError: its creation failed.
        """
        if model.awake:
            return
        folder = self._store.asleep(model.info.id)
        if self._models.get(model.info.id) is not model or not folder.exists():
            raise not_found(f"model {model.info.id!r} in training")
        await self._make_room(model)
        await self._create_session(model.info)
        await self._group.call("load_session", model.info.id, str(folder), True)
        model.awake = True
        shutil.rmtree(folder)  # it would be outdated after the next step, if the server came to a sudden end

    async def sleep(self, model: Model) -> None:
        """Save a model and free its memory."""
        if not model.awake:
            return
        folder = self._store.asleep(model.info.id)
        written = store.begin(folder)
        await self._group.call("save_session", model.info.id, str(written))
        (written / "model.json").write_text(json.dumps({"next_seq": model.line.next_seq, "steps": model.steps}))
        store.commit(written, folder)
        await self._group.call("delete_session", model.info.id)
        model.awake = model.gradient = False
        logger.info("model %s sleeps", model.info.id)

    async def unload(self, model: Model) -> None:
        """Free a model's memory permanently; what it saved stays."""
        if model.awake:
            await self._group.call("delete_session", model.info.id)
            model.awake = False
        shutil.rmtree(self._store.asleep(model.info.id), ignore_errors=True)
        self._models.pop(model.info.id, None)

    async def run_pass(self, model: Model, chunks: list[PassRequest | Exception]) -> list[bytes]:
        """Forward, and backward where asked for, of the chunks of one call: all of them or none."""
        requests = []
        for chunk in chunks:
            if isinstance(chunk, Exception):
                raise chunk
            requests.append(chunk)
        await self.wake(model)
        first = requests[0]
        kind = data.check_request(first)
        if kind.needs == "value_head" and not model.info.value_head:
            await self._group.call("add_value_head", model.info.id)
            model.info.value_head = True
            self._store.save_run(model.info)
        work = data.assemble(requests, kind)
        train = not first.forward_only
        outputs = await self._group.session_pass(model.info.id, work.batch, first.loss, first.settings, train)
        model.gradient = model.gradient or train
        return data.answers(work, outputs, requests)

    def check_pass(self, request: PassRequest) -> PassRequest | Exception:
        """The request, or its error, which the client gets when its turn comes, so that the order holds."""
        if request.fault is not None:
            return request.fault
        try:
            data.check_data(request, data.check_request(request), self._limits)
        except UserError as error:
            return error
        return request

    async def optim_step(self, model: Model, optim: OptimConfig) -> dict[str, float]:
        """One step; without a gradient it is refused, so that moments alone never move a parameter.

        Of a gradient that is not finite nothing is used: ``skipped`` is 1 and there is no ``grad_norm``.
        """
        await self.wake(model)
        if not model.gradient:
            raise UserError("optim_step has no gradient to step on; call forward_backward first.")
        metrics = await self._group.call("session_step", model.info.id, optim)
        model.gradient = False
        model.steps += 1
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    async def save(self, model: Model, path: paths.WeightsPath, overwrite: bool, **about: Any) -> Checkpoint:
        """Save weights, moments and value head (``weights``), or the adapter alone (``sampler_weights``)."""
        await self.wake(model)
        verb = "save_session" if path.kind == "weights" else "export_session"
        written = self._store.begin(path, overwrite)
        try:
            await self._group.call(verb, model.info.id, str(written))
            return self._store.commit(path, written, replace(model.info), **about)
        except BaseException:
            shutil.rmtree(written, ignore_errors=True)
            raise

    async def load(self, model: Model, checkpoint: Checkpoint, optimizer: bool) -> None:
        """Put saved weights into a model of the same shape.

        Raises:
            UserError: they belong to another kind of model.
        """
        await self.wake(model)
        theirs, mine = checkpoint.model, model.info
        for name in ("rank", "alpha", "train_attn", "train_mlp"):
            if getattr(theirs, name) != getattr(mine, name):
                raise UserError(
                    f"path={checkpoint.path!r} was saved by a model with {name}={getattr(theirs, name)}, this one has "
                    f"{getattr(mine, name)}; create a training client from the saved state instead."
                )
        if theirs.value_head and not mine.value_head:
            await self._group.call("add_value_head", mine.id)
            mine.value_head = True
            self._store.save_run(mine)
        await self._group.call("load_session", mine.id, str(self._store.folder(paths.parse(checkpoint.path))), optimizer)
        model.gradient = False


def base_names(config: Config) -> list[str]:
    """Names that clients may call the base model by; the first is the one that we use."""
    return [name for name in (config.model.name, config.model.path) if name]


def fresh_seed(seed: int | None) -> int:
    """A given seed, or a new one."""
    return random.SystemRandom().randrange(2**31) if seed is None else seed
