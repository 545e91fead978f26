"""The vLLM engine: AsyncLLM behind our protocol, on CPUs and GPUs.

The engine core is a child process; this side turns requests into vLLM's and its flat log-probabilities into arrays. See
`workers.engines.vllm.extension` for how the child loads weights. vLLM is imported in `start`, after its environment variables
are set.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import struct
import time
from collections.abc import Coroutine, Iterator
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch

from workers.engines.owner import OWNER_VARIABLE
from workers.engines.protocol import Completion, EngineDeadError, PauseMode, SamplingParams, WeightUpdate
from workers.engines.torch.engine import check_request
from workers.engines.vllm import nccl
from workers.engines.vllm.weight_memory import WeightMemory
from workers.process import without_garbage_collection

T = TypeVar("T")

CHUNK_BYTES = 256 * 2**20
"""Weights travel to the engine core in pieces of about this size."""
CLOSE_S = 2.0
"""How long the engine core may take to end by itself."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM reserves space for; a smaller adapter fits a larger slot."""
POLL_S = 0.5
"""How often a pending call looks whether the engine core is still alive."""


class VLLMEngine:
    """An engine over vLLM.

    Args:
        model_path: local Hugging Face folder.
        max_model_len: most tokens of a request, prompt included.
        dtype: dtype of the engine's weights.
        seed: seed of the engine's sampling; engines of one run need different ones.
        threads: CPU threads of the engine core.
        max_num_seqs: most requests in one step.
        max_lora_rank: rank of the adapters that will be served; 0: none, weights come as ``full`` or ``merged``.
        streams: weights may come over NCCL (`workers.engines.vllm.nccl`).
        tensor_parallel_size: GPUs that the engine spans.
        trust_remote_code: run code that the model folder ships.
        timeout_s: longest time that a call other than `generate` may take.
        engine_args: more arguments of vLLM's ``AsyncEngineArgs``.
    """

    def __init__(
        self,
        model_path: str,
        *,
        max_model_len: int = 1024,
        dtype: str = "float32",
        seed: int = 0,
        threads: int = 1,
        max_num_seqs: int = 256,
        max_lora_rank: int = 0,
        streams: bool = False,
        tensor_parallel_size: int = 1,
        trust_remote_code: bool = False,
        timeout_s: float = 600.0,
        engine_args: dict[str, Any] | None = None,
    ) -> None:
        self.version = 0
        self._max_model_len = max_model_len
        self._threads = threads
        self._timeout_s = timeout_s
        self._serves_adapters = max_lora_rank > 0
        self._args: dict[str, Any] = {
            "model": model_path,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "seed": seed,
            "max_num_seqs": max_num_seqs,
            "tensor_parallel_size": tensor_parallel_size,
            "trust_remote_code": trust_remote_code,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": -1,
            "disable_log_stats": True,
            "worker_extension_cls": "workers.engines.vllm.extension.WeightExtension",
        }
        if self._serves_adapters:
            slots = min(rank for rank in LORA_RANKS if rank >= max_lora_rank)
            self._args |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": slots}
        if tensor_parallel_size > 1:  # inside a placement group vLLM would ask Ray for GPUs beside those of its own bundle
            self._args["distributed_executor_backend"] = "mp"
        if streams:
            self._args["weight_transfer_config"] = {"backend": "nccl"}
        self._args |= engine_args or {}
        self._request_numbers = itertools.count()
        self._in_flight = 0
        self._paused = False
        self._lora_request: Any = None
        self._llm: Any = None
        self._vocabulary = 0
        self._seeds_allowed = False
        self._parameters: set[str] = set()
        self._memory = WeightMemory()

    async def start(self) -> None:
        """Start the engine core and load the model from disk."""
        on_cpu = not torch.cuda.is_available()
        for name, value in _environment(on_cpu, self._threads).items():
            os.environ.setdefault(name, value)
        os.environ[OWNER_VARIABLE] = str(os.getpid())
        with without_garbage_collection():
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

        config = AsyncEngineArgs(**{"enforce_eager": on_cpu, **self._args}).create_engine_config()
        self._vocabulary = int(config.model_config.get_vocab_size())
        self._seeds_allowed = not on_cpu
        self._llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        self._parameters = set((await self._rpc("rlframe_parameters"))[0])
        await self._call(self._llm.update_weight_version(str(self.version)), "label the weights")

    async def generate(self, tokens: np.ndarray, params: SamplingParams) -> Completion:
        """Sample a continuation; see `workers.engines.protocol.Engine.generate`."""
        check_request(len(tokens), params.max_new_tokens, self._max_model_len)
        prompt = {"type": "token", "prompt_token_ids": np.asarray(tokens).tolist()}
        k = min(params.logprobs, self._vocabulary)
        request_id = str(next(self._request_numbers))
        llm = self._running()
        wanted = _vllm_params(
            max_tokens=params.max_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            stop_token_ids=params.stop_token_ids,
            logprobs=k,
            seed=params.seed if self._seeds_allowed else None,
        )
        stream = llm.generate(prompt, wanted, request_id, lora_request=self._lora())
        self._in_flight += 1
        try:
            (final,) = [output async for output in stream]
        except Exception as error:
            if llm.errored:
                raise EngineDeadError("The vLLM engine core died with requests in flight; its log has the reason.") from error
            raise
        finally:
            self._in_flight -= 1
        return completion_of(final.outputs[0], k)

    def _lora(self) -> Any:
        """The adapter of a request that starts now."""
        return self._lora_request

    async def load_weights(self, update: WeightUpdate) -> str:
        """Serve ``update`` from now on; see `workers.engines.protocol.Engine.load_weights`."""
        if not self._paused:
            raise RuntimeError("Weights can only be loaded into a paused engine; call pause() first.")
        if (update.mode == "adapter") != self._serves_adapters:
            served = "adapters" if self._serves_adapters else "full or merged weights"
            raise ValueError(f"The engine was started for {served} and got a weight update of mode {update.mode!r}.")
        load = self._load_adapter if update.mode == "adapter" else self._load_parameters
        checksum = await load(update)
        await self._call(self._llm.update_weight_version(str(update.version)), "label the weights")
        self.version = update.version
        return checksum

    async def _load_parameters(self, update: WeightUpdate) -> str:
        if update.stream is not None:
            await self._call(nccl.receive(self._running(), update.stream, update.dtype), "receive weights over NCCL")
            return combine_sums(await self._rpc("rlframe_sums"))
        written: set[str] = set()
        pieces = list(cut(update.tensors, CHUNK_BYTES))
        for names in pieces:
            last = names is pieces[-1]
            self._memory.fill(update.tensors[name] for name in names)
            specs = [(name, list(update.tensors[name].shape)) for name in names]
            ranks = await self._rpc("rlframe_load", self._memory.path, specs, update.dtype, last)
            written.update(ranks[0][0])
        if update.mode == "full" and (missing := sorted(self._parameters - written)):
            raise ValueError(f"The full weight update left parameters of the engine as they were: {missing[:3]}.")
        return combine_sums([sums for _, sums in ranks])

    async def _load_adapter(self, update: WeightUpdate) -> str:
        from vllm.lora.request import LoRARequest

        if self._lora_request is None and self._in_flight:
            raise RuntimeError("Requests that started without an adapter are in flight; load the first adapter before any.")
        if update.adapter is None:
            raise ValueError("An adapter update needs the PEFT configuration in `adapter`.")
        blob = b"".join(array.tobytes() for array in update.tensors.values())
        specs = [(name, list(array.shape)) for name, array in update.tensors.items()]
        checksum = (await self._rpc("rlframe_load_adapter", blob, specs, update.dtype, update.adapter))[0]
        # The name is part of the prefix cache's keys: a block of an older adapter can never be taken for a new one's.
        self._lora_request = LoRARequest(f"policy-{update.version}", 1, "in-memory")
        return checksum

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling and forget the key-value cache; requests that are kept compute theirs again after `resume`."""
        # `AsyncLLM.pause_generation` is this call and a sleep of 20 ms that only tidies the order of events.
        await self._call(self._running().engine_core.pause_scheduler_async(mode=mode, clear_cache=True), "pause")
        self._paused = True

    async def resume(self) -> None:
        """Continue sampling."""
        await self._call(self._running().resume_generation(), "resume")
        self._paused = False

    async def health(self) -> None:
        """Raise EngineDeadError when the engine core is gone or does not answer."""
        await self._call(self._running().is_paused(), "answer")

    async def close(self) -> None:
        """End the engine core."""
        if self._llm is not None:
            self._llm.shutdown(timeout=CLOSE_S)
            self._llm = None
        self._memory.close()

    def _running(self) -> Any:
        if self._llm is None:
            raise EngineDeadError("The vLLM engine is not running; it was closed or never started.")
        return self._llm

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        return await self._call(self._running().collective_rpc(method, args=args), method)

    async def _call(self, call: Coroutine[Any, Any, T], what: str) -> T:
        """Await ``call``; a dead or silent engine core raises instead of leaving its caller waiting."""
        llm, task = self._running(), asyncio.create_task(call)
        deadline = time.monotonic() + self._timeout_s
        while not task.done() and not llm.errored and time.monotonic() < deadline:
            await asyncio.wait({task}, timeout=min(POLL_S, self._timeout_s))
        if task.done() and not llm.errored:
            return task.result()
        task.cancel()
        (failure,) = await asyncio.gather(task, return_exceptions=True)
        reason = "died" if llm.errored else f"did not answer within {self._timeout_s:g} s"
        raise EngineDeadError(f"The vLLM engine core {reason} when it was asked to {what}; its log has the reason.") from (
            failure if isinstance(failure, Exception) else None
        )


def _environment(on_cpu: bool, threads: int) -> dict[str, str]:
    """Defaults of vLLM's environment variables; one that the user has set keeps its value."""
    shared = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if not on_cpu:
        return shared
    return shared | {
        "OMP_NUM_THREADS": str(threads),
        # The engine core computes in its own process instead of starting another one for it.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Without it the first request that asks for log-probabilities compiles for 17 s.
        "TORCHDYNAMO_DISABLE": "1",
    }


@lru_cache(maxsize=64)
def _vllm_params(stop_token_ids: tuple[int, ...], **params: Any) -> Any:
    """vLLM's sampling parameters; one object serves all requests that have the same (vLLM copies it for each)."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VLLMSamplingParams(
        **params,
        stop_token_ids=list(stop_token_ids),
        ignore_eos=True,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def completion_of(output: Any, k: int) -> Completion:
    """Arrays from a vLLM ``CompletionOutput`` with flat log-probabilities.

    vLLM lists the sampled token and then the k likeliest of each position; the head is the latter, so its ids are distinct
    even where the sampled token comes twice.
    """
    flat, n = output.logprobs, len(output.token_ids)
    # Packing takes half the time of numpy's own look at every element of a list.
    ids = np.frombuffer(struct.pack(f"{n * (k + 1)}i", *flat.token_ids), np.int32).reshape(n, k + 1).copy()
    logprobs = np.frombuffer(struct.pack(f"{n * (k + 1)}d", *flat.logprobs)).astype(np.float32).reshape(n, k + 1)
    versions = np.zeros(n, dtype=np.int32)
    for span in output.weight_versions or []:
        versions[span.start : span.end] = int(span.version)
    return Completion(
        ids=ids[:, 0],
        logprobs=logprobs[:, 0],
        head_ids=ids[:, 1:],
        head_logprobs=logprobs[:, 1:],
        versions=versions,
        finish=output.finish_reason,
    )


def cut(tensors: dict[str, np.ndarray], size: int) -> Iterator[list[str]]:
    """Names of whole tensors that together have about ``size`` bytes, in order; at least one group, empty for no tensors."""
    names: list[str] = []
    filled = 0
    for name, array in tensors.items():
        if names and filled + array.nbytes > size:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += array.nbytes
    yield names


def combine_sums(ranks: list[dict[str, str]]) -> str:
    """One checksum from every rank's sums of bit patterns; a parameter with the same sum on all ranks is a replica."""
    total = 0
    for name in ranks[0]:
        sums = [int(rank[name], 16) for rank in ranks]
        total += sums[0] if len(set(sums)) == 1 else sum(sums)
    return f"{total % 2**64:016x}"
