"""The SGLang engine: a server of our own in a child process, or one at an address, behind our protocol.

Requests travel as JSON (`workers.engines.sglang.wire`), weights as safetensors through a folder that both sides see: no pickle
is written or read. See `workers.engines.sglang.server` for how the server differs from SGLang's own and
`workers.engines.sglang.process` for the child process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from typing import Any

import aiohttp
import numpy as np
import torch
from transformers import AutoConfig

from rlframe.config import ConfigError
from workers.engines.protocol import Completion, EngineDeadError, PauseMode, SamplingParams, WeightUpdate
from workers.engines.sglang.process import SPARE_TOKENS, ServerProcess, cpu_arguments
from workers.engines.sglang.weights import check_update, weights_folder
from workers.engines.sglang.wire import ADAPTER_PREFIX, CHECKSUM_PREFIX, completion_of, failure_of, generate_body
from workers.engines.torch.engine import check_request
from workers.engines.vllm.engine import combine_sums
from workers.engines.weights import DTYPES

PAUSE_MODES: dict[PauseMode, str] = {"keep": "retract", "abort": "abort"}
"""Our pause modes in SGLang's words: a retracted request gives its key-value cache back and computes it again."""
POLL_S = 0.2
"""How often a starting server is asked whether it is ready."""


class SGLangEngine:
    """An engine over an SGLang server.

    Args:
        model_path: local Hugging Face folder.
        url: address of a server started with ``python -m workers.engines.sglang.server``; None: start one here.
        weights_dir: folder that weights pass through, seen by the server, too; None: this machine's memory or temporary files.
        max_model_len: most tokens of a request, prompt included.
        dtype: dtype of the engine's weights.
        seed: seed of the engine's sampling; engines of one run need different ones.
        threads: CPU threads of the server.
        max_num_seqs: most requests in one step.
        max_lora_rank: rank of the adapters that will be served; 0: none, weights come as ``full`` or ``merged``.
        tensor_parallel_size: GPUs that the engine spans.
        trust_remote_code: run code that the model folder ships.
        timeout_s: longest time that a call other than `generate` may take.
        engine_args: more arguments of SGLang's ``ServerArgs``; without effect on a server at an address.
    """

    def __init__(
        self,
        model_path: str,
        *,
        url: str | None = None,
        weights_dir: str | None = None,
        max_model_len: int = 1024,
        dtype: str = "float32",
        seed: int = 0,
        threads: int = 1,
        max_num_seqs: int = 256,
        max_lora_rank: int = 0,
        tensor_parallel_size: int = 1,
        trust_remote_code: bool = False,
        timeout_s: float = 600.0,
        engine_args: dict[str, Any] | None = None,
    ) -> None:
        self.version = 0
        self._model_path = model_path
        self._url = url
        self._weights_dir = weights_dir
        self._max_model_len = max_model_len
        self._dtype = dtype
        self._threads = threads
        self._timeout_s = timeout_s
        self._serves_adapters = max_lora_rank > 0
        self._config = AutoConfig.from_pretrained(
            model_path, local_files_only=True, trust_remote_code=trust_remote_code
        ).get_text_config()
        self._args: dict[str, Any] = {
            "model_path": model_path,
            "dtype": dtype,
            "context_length": max_model_len + SPARE_TOKENS,
            "random_seed": seed,
            "max_running_requests": max_num_seqs,
            "tp_size": tensor_parallel_size,
            "trust_remote_code": trust_remote_code,
            "skip_tokenizer_init": True,
            "skip_server_warmup": True,
            "sampling_defaults": "openai",
            "log_level": "warning",
        }
        if self._serves_adapters:
            self._args |= {
                "enable_lora": True,
                "max_lora_rank": max_lora_rank,
                "lora_target_modules": ["all"],
                "max_loras_per_batch": 1,
                "max_loaded_loras": 2,
            }
        self._engine_args = engine_args or {}
        self._request_numbers = itertools.count()
        self._client_id = uuid.uuid4().hex[:8]
        self._in_flight = 0
        self._paused: PauseMode | None = None
        self._adapter: str | None = None
        self._process: ServerProcess | None = None
        self._session: aiohttp.ClientSession | None = None
        self._abort_tasks: set[asyncio.Task] = set()

    async def start(self) -> None:
        """Start the server, or find the one at the address, and wait until it answers; after a failure none is left."""
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        if self._url is None:
            on_cpu = not torch.cuda.is_available()
            itemsize = DTYPES[self._dtype].itemsize
            here = cpu_arguments(self._config, itemsize, self._max_model_len) if on_cpu else {}
            self._process = ServerProcess(self._args | here | self._engine_args, threads=self._threads, on_cpu=on_cpu)
        address = self._url or self._process.url  # type: ignore[union-attr]  # one of the two is there
        # A connection for each request: SGLang hangs up after 5 idle seconds, and a request that is sent at that moment would
        # look as if the server had died.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(address, connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        await self._ready()
        await self._checksum()
        await self._label(0)

    async def _ready(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    if self._process is not None and self._process.ended():
                        raise EngineDeadError("The SGLang server ended while it started; its log has the reason.")
                    try:
                        async with self._running().get("/model_info") as answer:
                            if answer.status == 200:
                                return
                    except aiohttp.ClientConnectionError:
                        pass  # it does not listen yet
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            where = "its log has the reason" if self._url is None else f"is one running at {self._url}?"
            raise EngineDeadError(f"The SGLang server was not ready within {self._timeout_s:g} s; {where}") from error

    async def generate(self, tokens: np.ndarray, params: SamplingParams) -> Completion:
        """Sample a continuation; see `workers.engines.protocol.Engine.generate`.

        Raises:
            ValueError: also for top_p below 1 or a top_k: SGLang's log-probabilities are those before both.
        """
        check_request(len(tokens), params.max_new_tokens, self._max_model_len)
        if params.top_p < 1 or params.top_k > 0:
            raise ValueError(
                f"SGLang reports log-probabilities from before top_p={params.top_p:g} and top_k={params.top_k}, which are not "
                "those of the sampled distribution; set rollout.top_p=1 and rollout.top_k=0."
            )
        k = min(params.logprobs, self._config.vocab_size)
        self._in_flight += 1
        try:
            completion = await self._sample(tokens, params, k)
        finally:
            self._in_flight -= 1
        _check_end(completion, params)
        return completion

    async def _sample(self, tokens: np.ndarray, params: SamplingParams, k: int) -> Completion:
        request_id, adapter = f"{self._client_id}-{next(self._request_numbers)}", self._adapter
        try:
            answer = await self._call("/generate", generate_body(request_id, tokens, params, k, adapter))
        except asyncio.CancelledError:
            task = asyncio.create_task(self._call("/abort_request", {"rid": request_id}))
            self._abort_tasks.add(task)
            task.add_done_callback(self._abort_done)
            raise
        except ValueError:
            if adapter == self._adapter:
                raise
            # It was still queued when its adapter was replaced; nothing has been sampled.
            return await self._sample(tokens, params, k)
        return completion_of(answer, k)

    def _abort_done(self, task: asyncio.Task) -> None:
        self._abort_tasks.discard(task)
        if not task.cancelled():
            task.exception()

    async def load_weights(self, update: WeightUpdate) -> str:
        """Serve ``update`` from now on; see `workers.engines.protocol.Engine.load_weights`.

        Raises:
            RuntimeError: also when requests that are kept in flight would continue under another adapter; SGLang leaves each
                request the adapter that it started with.
        """
        if self._paused is None:
            raise RuntimeError("Weights can only be loaded into a paused engine; call pause() first.")
        if (update.mode == "adapter") != self._serves_adapters:
            served = "adapters" if self._serves_adapters else "full or merged weights"
            raise ValueError(f"The engine was started for {served} and got a weight update of mode {update.mode!r}.")
        if update.dtype != self._dtype:
            raise ValueError(f"The engine serves {self._dtype}, the weight update is {update.dtype}.")
        check_update(update, self._model_path, tied=bool(self._config.tie_word_embeddings))
        with weights_folder(update, self._weights_dir) as folder:
            await (self._load_adapter if update.mode == "adapter" else self._load_parameters)(update, folder)
        checksum = await self._checksum()
        self.version = update.version
        return checksum

    async def _load_parameters(self, update: WeightUpdate, folder: str) -> None:
        body = {"model_path": folder, "load_format": "safetensors", "weight_version": str(update.version), "flush_cache": True}
        await self._control("/update_weights_from_disk", body)

    async def _load_adapter(self, update: WeightUpdate, folder: str) -> None:
        if self._paused == "keep" and self._in_flight:
            raise RuntimeError(
                "Requests in flight would keep the adapter that they started with; set rollout.on_update=abort, or "
                "rollout.weight_sync=merged."
            )
        name, old = f"policy-{update.version}-{uuid.uuid4().hex[:8]}", self._adapter
        await self._control("/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        if old is not None:
            await self._control("/unload_lora_adapter", {"lora_name": old})
        self._adapter = name
        await self._control("/flush_cache")
        await self._label(update.version)

    async def _label(self, version: int) -> None:
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._control("/update_weight_version", body)

    async def _checksum(self) -> str:
        """Sum of the bit patterns of all that the server holds, read by it from the memory that its layers multiply by."""
        answer = await self._control("/weights_checker", {"action": "checksum"})
        ranks = [rank["checksums"] for rank in answer["ranks"]]
        if not all(value.startswith(CHECKSUM_PREFIX) for rank in ranks for value in rank.values()):
            raise ConfigError(
                f"The SGLang server at {self._url} cannot say which weights it serves; start it with "
                "`python -m workers.engines.sglang.server` and the same flags."
            )
        if self._adapter is not None:
            ranks = [{name: value for name, value in rank.items() if name.startswith(ADAPTER_PREFIX)} for rank in ranks]
        return combine_sums([{name: value.removeprefix(CHECKSUM_PREFIX) for name, value in rank.items()} for rank in ranks])

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling; requests that are kept give their key-value cache back and compute it again after `resume`."""
        await self._control("/pause_generation", {"mode": PAUSE_MODES[mode]})
        self._paused = mode

    async def resume(self) -> None:
        """Continue sampling."""
        await self._control("/continue_generation", {"torch_empty_cache": False})
        self._paused = None

    async def health(self) -> None:
        """Raise EngineDeadError when the server is gone or its scheduler does not answer."""
        await self._control("/server_info")

    async def close(self) -> None:
        """End the server, if it is ours, and the connection."""
        for task in self._abort_tasks:
            task.cancel()
        if self._session is not None:
            await self._session.close()
            self._session = None
        if self._process is not None:
            self._process.stop()
            self._process = None

    def _running(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise EngineDeadError("The SGLang engine is not running; it was closed or never started.")
        return self._session

    async def _control(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """A call that the server answers at once, also while it is paused."""
        self._running()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._call(path, body)
        except TimeoutError as error:
            raise EngineDeadError(
                f"The SGLang server did not answer {path} within {self._timeout_s:g} s; its log has the reason."
            ) from error

    async def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The server's answer to a POST of ``body``, or without one to a GET."""
        try:
            method = "GET" if body is None else "POST"
            async with self._running().request(method, path, json=body) as answer:
                status, content = answer.status, await answer.read()
        except aiohttp.ClientError as error:
            raise EngineDeadError(f"The SGLang server died before it answered {path}; its log has the reason.") from error
        if status != 200:
            raise failure_of(path, status, content)
        return json.loads(content) if content[:1] == b"{" else None


def _check_end(completion: Completion, params: SamplingParams) -> None:
    """Refuse a finish reason that was not requested.

    Raises:
        RuntimeError: the model's own end token ended the request, or the server cut its budget.
    """
    n = len(completion.ids)
    if completion.finish == "stop" and int(completion.ids[-1]) not in params.stop_token_ids:
        raise RuntimeError(
            f"SGLang stopped at token {int(completion.ids[-1])}, not a stop token of the request; start the server with "
            "`python -m workers.engines.sglang.server`."
        )
    if completion.finish == "length" and n < params.max_new_tokens:
        raise RuntimeError(
            f"SGLang ended a request after {n} of {params.max_new_tokens} tokens; start the server with a --context-length of "
            f"rollout.max_model_len + {SPARE_TOKENS}."
        )
