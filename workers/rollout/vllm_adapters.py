"""vLLM with many runtime adapters: every request names its own, vLLM reads the folder and batches them together.

The engine itself is `workers.rollout.vllm`. An adapter's integer id is never given to another one, so that neither the
prefix cache nor a slot can mix two versions up.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from workers.rollout.adapters import CURRENT, PromptScores, ScoreRequest, ServedAdapter
from workers.rollout.engine import Completion, SamplingParams
from workers.rollout.torch_engine import check_request
from workers.rollout.vllm import VLLMEngine


class VLLMAdapterEngine(VLLMEngine):
    """`workers.rollout.adapters.AdapterEngine` over vLLM.

    Args:
        model_path: local Hugging Face folder.
        max_loras: most adapters in one step; more wait in main memory.
        options: see `VLLMEngine`; ``max_lora_rank`` is the largest rank that can be served.
    """

    def __init__(self, model_path: str, *, max_loras: int = 8, **options: Any) -> None:
        super().__init__(model_path, **options)
        self._args |= {"max_loras": max_loras, "max_cpu_loras": 4 * max_loras}
        self._ids: dict[str, int] = {}
        self._next_id = itertools.count(1)

    def _lora(self) -> Any:
        from vllm.lora.request import LoRARequest

        adapter = CURRENT.get()
        if adapter is None:
            return None
        if adapter.key not in self._ids:
            self._ids[adapter.key] = next(self._next_id)
        return LoRARequest(adapter.key, self._ids[adapter.key], adapter.folder)

    async def sample(self, tokens: np.ndarray, params: SamplingParams, adapter: ServedAdapter | None) -> Completion:
        """See `AdapterEngine.sample`; a seed is ignored on CPUs, where vLLM's sampler cannot resume one."""
        CURRENT.set(adapter)
        return await self.generate(tokens, params)

    async def score(self, tokens: np.ndarray, request: ScoreRequest, adapter: ServedAdapter | None) -> PromptScores:
        """See `AdapterEngine.score`; targets and draws are refused."""
        if request.targets is not None or request.draws:
            raise ValueError(
                "target_prompt_logprobs and prompt_alt_tokens_k are not available with rollout.engine=vllm, which reports the "
                "prompt's own tokens and the likeliest ones only; use topk_prompt_logprobs or forward()."
            )
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind

        check_request(len(tokens), 1, self._max_model_len)
        CURRENT.set(adapter)
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
        """See `AdapterEngine.forget`."""
        if number := self._ids.pop(adapter.key, None):
            await self._call(self._running().remove_lora(number), "forget an adapter")


def _scores(flat: Any, length: int, k: int) -> PromptScores:
    """Arrays from vLLM's flat prompt log-probabilities: the token itself, then the k likeliest, from position 1 on."""
    ids = np.array(flat.token_ids, np.int32).reshape(length - 1, k + 1)
    logprobs = np.array(flat.logprobs, np.float32).reshape(length - 1, k + 1)
    nothing = np.full((1, k + 1), np.nan, np.float32)
    ids, logprobs = np.concatenate([np.zeros((1, k + 1), np.int32), ids]), np.concatenate([nothing, logprobs])
    return PromptScores(logprobs=logprobs[:, 0], top_ids=ids[:, 1:], top_logprobs=logprobs[:, 1:])
