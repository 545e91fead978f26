"""vLLM with many runtime adapters: every request names its own; vLLM reads the folder and batches them together.

The engine itself is `workers.engines.vllm.engine`. An adapter's integer id is never given to another one, so that neither the
prefix cache nor a slot can mix two versions up.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlframe.lora import Adapters
from rlframe.model_setup import empty_model
from workers.engines.adapters import CURRENT, PromptScores, ScoreRequest, ServedAdapter
from workers.engines.protocol import Completion, EngineDeadError, SamplingParams
from workers.engines.torch.engine import check_request
from workers.engines.vllm.engine import VLLMEngine


class VLLMAdapterEngine(VLLMEngine):
    """`workers.engines.adapters.AdapterEngine` over vLLM.

    Args:
        model_path: local Hugging Face folder.
        max_loras: most adapters in one step; more wait in main memory.
        options: see `VLLMEngine`; ``max_lora_rank`` is the largest rank that can be served.
    """

    def __init__(self, model_path: str, *, max_loras: int = 8, **options: Any) -> None:
        super().__init__(model_path, **options)
        self._args |= {"max_loras": max_loras, "max_cpu_loras": 4 * max_loras}
        linear = Adapters(
            empty_model(Path(model_path), torch.float32, "eager", self._args["trust_remote_code"])
        ).linear_modules()
        self._adapts_head = bool(linear["unembed"])
        if not self._adapts_head:
            # Otherwise vLLM prepares the head for adapters, too, and then cannot score prompts.
            names = {name.rpartition(".")[2] for name in (*linear["attn"], *linear["mlp"])}
            self._args.setdefault("lora_target_modules", sorted(names))
        self._requests: dict[str, asyncio.Task[Any]] = {}
        self._next_id = itertools.count(1)

    def _lora(self) -> Any:
        adapter = CURRENT.get()
        return None if adapter is None else self._requests[adapter.key].result()

    async def _use(self, adapter: ServedAdapter | None) -> None:
        """Let what this task asks for run under ``adapter``, which is read before its first use.

        An adapter that fails while it is read within a step would end the engine core.
        """
        CURRENT.set(adapter)
        if adapter is None:
            return
        if adapter.key not in self._requests:
            self._requests[adapter.key] = asyncio.create_task(self._read(adapter))
        try:
            await asyncio.shield(self._requests[adapter.key])
        except ValueError:
            self._requests.pop(adapter.key, None)
            raise

    async def _read(self, adapter: ServedAdapter) -> Any:
        from vllm.lora.request import LoRARequest

        request = LoRARequest(adapter.key, next(self._next_id), adapter.folder)
        try:
            await self._call(self._running().add_lora(request), "read an adapter")
        except EngineDeadError:
            raise
        except Exception as error:
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            raise ValueError(f"vLLM cannot serve this adapter for this model: {reason}") from error
        return request

    async def sample(self, tokens: np.ndarray, params: SamplingParams, adapter: ServedAdapter | None) -> Completion:
        """Sample one completion under an adapter; a seed is ignored on CPUs, where vLLM's sampler cannot resume one."""
        await self._use(adapter)
        return await self.generate(tokens, params)

    async def score(self, tokens: np.ndarray, request: ScoreRequest, adapter: ServedAdapter | None) -> PromptScores:
        """See `AdapterEngine.score`; targets and draws are refused, and everything where the LM head is its own.

        vLLM applies the adapters of a head to the rows that it samples from, which prompts have more of; the engine core ends.
        """
        if request.targets is not None or request.draws:
            raise ValueError(
                "target_prompt_logprobs and prompt_alt_tokens_k are not available with rollout.engine=vllm, which reports the "
                "prompt's own tokens and the likeliest ones only; use topk_prompt_logprobs or forward()."
            )
        if self._adapts_head:
            raise ValueError(
                "Log-probabilities of prompts are not available with rollout.engine=vllm for a model whose LM head can have an "
                "adapter; use rollout.engine=torch or forward()."
            )
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind

        check_request(len(tokens), 1, self._max_model_len)
        await self._use(adapter)
        k = min(request.top_k, self._vocabulary)
        wanted = VLLMSamplingParams(
            max_tokens=1,
            prompt_logprobs=k,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt: Any = {"type": "token", "prompt_token_ids": np.asarray(tokens).tolist()}
        stream = self._running().generate(prompt, wanted, str(next(self._request_numbers)), lora_request=self._lora())
        (final,) = [output async for output in stream]
        return _scores(final.prompt_logprobs, len(tokens), k)

    async def forget(self, adapter: ServedAdapter) -> None:
        """Drop an adapter from vLLM's memory."""
        if (task := self._requests.pop(adapter.key, None)) is not None:
            request = await task
            await self._call(self._running().remove_lora(request.lora_int_id), "forget an adapter")


def _scores(flat: Any, length: int, k: int) -> PromptScores:
    """Arrays from vLLM's flat prompt log-probabilities: the token itself, then the k likeliest, from position 1 on."""
    ids = np.array(flat.token_ids, np.int32).reshape(length - 1, k + 1)
    logprobs = np.array(flat.logprobs, np.float32).reshape(length - 1, k + 1)
    nothing = np.full((1, k + 1), np.nan, np.float32)
    ids, logprobs = np.concatenate([np.zeros((1, k + 1), np.int32), ids]), np.concatenate([nothing, logprobs])
    return PromptScores(logprobs=logprobs[:, 0], top_ids=ids[:, 1:], top_logprobs=logprobs[:, 1:])
