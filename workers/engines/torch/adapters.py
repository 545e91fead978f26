"""The reference sampler with many adapters: each request computes under its own, one step at a time.

Adapters are held in memory, the least recently used one is dropped when there are too many. Sampling itself is
`workers.engines.torch.engine`.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlframe.config import LoraConfig
from rlframe.lora import Adapter, Adapters
from workers.engines.adapters import CURRENT, PromptScores, ScoreRequest, ServedAdapter
from workers.engines.protocol import Completion, SamplingParams
from workers.engines.torch.engine import TorchEngine, _Request, copy_parameters


class TorchAdapterEngine(TorchEngine):
    """`workers.engines.adapters.AdapterEngine` over one transformers model.

    Args:
        model_path: local Hugging Face folder.
        max_loras: most adapters held in memory.
        options: see `TorchEngine`.
    """

    def __init__(self, model_path: str, *, max_loras: int = 8, **options: Any) -> None:
        super().__init__(model_path, **options)
        self._adapters = Adapters(self._model.module)
        self._held: OrderedDict[str, Adapter] = OrderedDict()
        self._max_loras = max_loras

    async def sample(self, tokens: np.ndarray, params: SamplingParams, adapter: ServedAdapter | None) -> Completion:
        """Sample one completion under an adapter, token by token."""
        CURRENT.set(adapter)
        return await self.generate(tokens, params)

    def _step(self, request: _Request, params: SamplingParams) -> None:
        with self._under(CURRENT.get()):
            super()._step(request, params)

    async def score(self, tokens: np.ndarray, request: ScoreRequest, adapter: ServedAdapter | None) -> PromptScores:
        """Score a prompt under an adapter in one forward pass."""
        with self._under(adapter), torch.inference_mode():
            ids = torch.from_numpy(np.asarray(tokens, np.int64)).to(self._device)
            logits = self._model.module(input_ids=ids[None], use_cache=False).logits[0].float()
        logprobs = torch.log_softmax(logits[:-1], -1)
        top = torch.topk(logprobs, min(request.top_k, self._vocabulary))
        scores = PromptScores(
            logprobs=_with_unscored_first_token(logprobs.gather(1, ids[1:, None])[:, 0]),
            top_ids=np.concatenate([np.zeros((1, top.indices.shape[1])), top.indices.cpu().numpy()]).astype(np.int32),
            top_logprobs=_with_unscored_first_token(top.values),
        )
        if request.targets is not None:
            wanted = torch.tensor(request.targets, device=self._device)
            scores.target_logprobs = torch.where(wanted < 0, 0.0, logprobs.gather(1, wanted.clamp(min=0))).cpu().numpy()
        if request.draws:
            drawn, theirs = _draw(logits[:-1], request)
            scores.drawn_ids, scores.drawn_logprobs = drawn.cpu().numpy(), theirs.cpu().numpy()
        return scores

    async def forget(self, adapter: ServedAdapter) -> None:
        """Drop an adapter from memory."""
        if held := self._held.pop(adapter.key, None):
            self._adapters.delete(held)

    @contextmanager
    def _under(self, adapter: ServedAdapter | None) -> Iterator[None]:
        """The model computes with ``adapter`` inside; nothing may be awaited meanwhile."""
        if adapter is None:
            yield
            return
        if adapter.key not in self._held:
            while len(self._held) >= self._max_loras:
                self._adapters.delete(self._held.popitem(last=False)[1])
            self._held[adapter.key] = self._read(Path(adapter.folder))
        self._held.move_to_end(adapter.key)
        with self._held[adapter.key].active():
            yield

    def _read(self, folder: Path) -> Adapter:
        config = json.loads((folder / "adapter_config.json").read_text())
        lora = LoraConfig(
            rank=config["r"],
            alpha=config["lora_alpha"],
            targets=config["target_modules"],
            target_parameters=config.get("target_parameters") or [],
        )
        adapter = self._adapters.create(lora, seed=0, value_head=False)
        held = {f"base_model.model.{name}": parameter for name, parameter in adapter.factors().items()}
        for parameter in held.values():
            parameter.requires_grad_(False)
        tensors = {name: tensor.to(held[name]) for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
        copy_parameters(dict(held), tensors, complete=True)
        return adapter


def _with_unscored_first_token(rows: Tensor) -> np.ndarray:
    """``rows`` with a row of NaN before them: nothing predicts the first token."""
    return torch.cat([rows.new_full((1, *rows.shape[1:]), torch.nan), rows]).cpu().numpy()


def _draw(logits: Tensor, request: ScoreRequest) -> tuple[Tensor, Tensor]:
    """int64[P - 1, n] tokens at the temperature of the request, and their log-probabilities there."""
    generator = torch.Generator(device=logits.device)
    if request.seed is None:
        generator.seed()
    else:
        generator.manual_seed(request.seed)
    logprobs = torch.log_softmax(logits / (request.temperature or 1.0), -1)
    if request.temperature == 0:
        drawn = logprobs.argmax(-1, keepdim=True).expand(-1, request.draws)
    else:
        drawn = torch.multinomial(logprobs.exp(), request.draws, replacement=True, generator=generator)
    return drawn, logprobs.gather(1, drawn)
