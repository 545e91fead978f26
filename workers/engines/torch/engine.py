"""The reference sampler: transformers, one request at a time, bit-identical numbers whatever else runs.

Every request is its own batch of one with its own cache and its own random generator, so neither the order of arrival nor
the number of neighbours can change what it samples. For tests, exactness checks and machines without vLLM; speed is no goal.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlframe.checksum import weights_checksum
from rlframe.hf_checkpoint import to_module_names
from workers.engines.protocol import Completion, EngineDeadError, PauseMode, SamplingParams, WeightUpdate
from workers.engines.torch.model import TorchModel
from workers.engines.weights import to_torch


@dataclass
class _Request:
    """One request in flight: its tokens so far, and the cache of a prefix of them under one version."""

    tokens: list[int]
    generator: torch.Generator
    cache: Any = None
    cached: int = 0
    cache_version: int | None = None
    aborted: bool = False
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    heads: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class TorchEngine:
    """An engine over one transformers model in this process.

    Args:
        model_path: local Hugging Face folder.
        max_model_len: most tokens of a request, prompt included.
        dtype: torch dtype of the weights; logits are float32 from the head on.
        device: where the model lives.
        trust_remote_code: run code that the model folder ships.
    """

    def __init__(
        self,
        model_path: str,
        *,
        max_model_len: int = 1024,
        dtype: str = "float32",
        device: str = "cpu",
        trust_remote_code: bool = False,
    ) -> None:
        self.version = 0
        self._max_model_len = max_model_len
        self._device = torch.device(device)
        self._model = TorchModel(
            model_path,
            max_model_len=max_model_len,
            dtype=dtype,
            device=self._device,
            trust_remote_code=trust_remote_code,
        )
        self._base = dict(self._model.module.named_parameters())
        self._vocabulary = self._model.vocabulary
        self._in_flight: dict[int, _Request] = {}
        self._paused = False
        self._closed = False
        self._changed = asyncio.Condition()

    async def start(self) -> None:
        """Nothing to do: the model was loaded by the constructor."""

    async def generate(self, tokens: np.ndarray, params: SamplingParams) -> Completion:
        """Sample a continuation; see `workers.engines.protocol.Engine.generate`."""
        check_request(len(tokens), params.max_new_tokens, self._max_model_len)
        generator = torch.Generator(device=self._device)
        generator.manual_seed(int.from_bytes(os.urandom(7), "little") if params.seed is None else params.seed)
        request = _Request(tokens=np.asarray(tokens).tolist(), generator=generator)
        self._in_flight[id(request)] = request
        try:
            finish = await self._sample(request, params)
        finally:
            del self._in_flight[id(request)]
        return _completion(request, min(params.logprobs, self._vocabulary), finish)

    async def _sample(self, request: _Request, params: SamplingParams) -> str:
        while len(request.ids) < params.max_new_tokens:
            await asyncio.sleep(0)
            if self._paused:
                async with self._changed:
                    await self._changed.wait_for(lambda: not self._paused or request.aborted or self._closed)
            if self._closed:
                raise EngineDeadError("The torch engine was closed while requests were in flight.")
            if request.aborted:
                return "abort"
            self._step(request, params)
            if request.ids[-1] in params.stop_token_ids:
                return "stop"
        return "length"

    @torch.inference_mode()
    def _step(self, request: _Request, params: SamplingParams) -> None:
        if request.cache_version != self.version:
            request.cache, request.cached, request.cache_version = self._model.cache(), 0, self.version
        logits = self._model.next_logits(request.tokens[request.cached :], request.cache)
        request.cached = 0 if request.cache is None else len(request.tokens)
        logprobs = processed_logprobs(logits, params)
        if params.temperature == 0:
            token = int(logprobs.argmax())
        else:
            token = int(torch.multinomial(logprobs.exp(), 1, generator=request.generator))
        best = torch.topk(logprobs, min(params.logprobs, self._vocabulary))
        request.tokens.append(token)
        request.ids.append(token)
        request.logprobs.append(float(logprobs[token]))
        request.heads.append((best.indices.cpu().numpy(), best.values.cpu().numpy()))
        request.versions.append(self.version)

    async def load_weights(self, update: WeightUpdate) -> str:
        """Serve ``update`` from now on; caches of requests in flight are computed again from their tokens."""
        if not self._paused:
            raise RuntimeError("Weights can only be loaded into a paused engine; call pause() first.")
        tensors = {name: to_torch(array, update.dtype).to(self._device) for name, array in update.tensors.items()}
        held = (
            self._load_adapter(tensors, update.adapter) if update.mode == "adapter" else self._load_base(tensors, update.mode)
        )
        self.version = update.version
        return weights_checksum(held)

    def _load_base(self, tensors: dict[str, Tensor], mode: str) -> Iterable[Tensor]:
        named = to_module_names(self._model.module, tensors)
        copy_parameters(self._base, {name: t for name, t in named.items() if name in self._base}, complete=mode == "full")
        return self._base.values()

    def _load_adapter(self, tensors: dict[str, Tensor], adapter: dict | None) -> Iterable[Tensor]:
        if adapter is None:
            raise ValueError("An adapter update needs the PEFT configuration in `adapter`.")
        if not hasattr(self._model.module, "peft_config"):
            from peft import LoraConfig, get_peft_model

            wanted = {name: value for name, value in adapter.items() if name not in ("peft_type", "task_type")}
            self._model.module = get_peft_model(self._model.module, LoraConfig(**wanted)).eval().requires_grad_(False)
        held = {name.replace(".default", ""): p for name, p in self._model.module.named_parameters() if ".lora_" in name}
        copy_parameters(held, tensors, complete=True)
        return held.values()

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling; a step is never interrupted."""
        self._paused = True
        if mode == "abort":
            for request in self._in_flight.values():
                request.aborted = True
        await self._notify()

    async def resume(self) -> None:
        """Continue sampling."""
        self._paused = False
        await self._notify()

    async def health(self) -> None:
        """Raise when closed."""
        if self._closed:
            raise EngineDeadError("The torch engine is closed.")

    async def close(self) -> None:
        """Release the model; requests in flight raise."""
        self._closed = True
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def check_request(prompt: int, budget: int, max_model_len: int) -> None:
    """Refuse a request of ``prompt`` tokens and ``budget`` new ones that an engine's context cannot hold.

    Raises:
        ValueError: with both numbers and what to change.
    """
    if prompt < 1:
        raise ValueError("The prompt is empty; an engine needs at least one token to continue.")
    if budget < 1:
        raise ValueError(f"max_new_tokens is {budget}; it must be at least 1.")
    if prompt + budget > max_model_len:
        raise ValueError(
            f"A prompt of {prompt} tokens and a budget of {budget} do not fit max_model_len={max_model_len}; "
            "raise rollout.max_model_len or lower rollout.max_new_tokens."
        )


def processed_logprobs(logits: Tensor, params: SamplingParams) -> Tensor:
    """float32[V], nats: the distribution that is sampled from, after temperature, top-k and top-p; greedy keeps temperature 1.

    ``logits`` is [V] of any dtype; everything after it is float32.
    """
    logits = logits.float() / (params.temperature or 1.0)
    if 0 < params.top_k < len(logits):
        logits = logits.masked_fill(logits < torch.topk(logits, params.top_k).values[-1], -torch.inf)
    if params.top_p < 1:
        ordered, order = torch.sort(logits, descending=True)
        probabilities = torch.softmax(ordered, -1)
        outside = torch.cumsum(probabilities, -1) - probabilities >= params.top_p
        logits = logits.index_fill(0, order[outside], -torch.inf)
    return torch.log_softmax(logits, -1)


def copy_parameters(held: dict[str, Tensor], tensors: dict[str, Tensor], *, complete: bool) -> None:
    """Copy ``tensors`` into the parameters ``held`` by name; nothing is written unless all of them fit.

    Raises:
        ValueError: a name is unknown, a shape or dtype differs, or (``complete``) a parameter got nothing.
    """
    unknown = sorted(tensors.keys() - held.keys())
    missing = sorted(held.keys() - tensors.keys()) if complete else []
    if unknown or missing:
        raise ValueError(f"The weight update does not fit the engine's model: unknown {unknown[:3]}, missing {missing[:3]}.")
    for name, tensor in tensors.items():
        if held[name].shape != tensor.shape or held[name].dtype != tensor.dtype:
            raise ValueError(
                f"The weight update has {name} as {tensor.dtype} {tuple(tensor.shape)}, "
                f"the engine holds {held[name].dtype} {tuple(held[name].shape)}."
            )
    for name, tensor in tensors.items():
        held[name].copy_(tensor)


def _completion(request: _Request, k: int, finish: str) -> Completion:
    n = len(request.ids)
    return Completion(
        ids=np.array(request.ids, dtype=np.int32),
        logprobs=np.array(request.logprobs, dtype=np.float32),
        head_ids=np.array([ids for ids, _ in request.heads], dtype=np.int32).reshape(n, k),
        head_logprobs=np.array([values for _, values in request.heads], dtype=np.float32).reshape(n, k),
        versions=np.array(request.versions, dtype=np.int32),
        finish=finish,
    )
