"""A server that speaks SGLang's HTTP format (0.5.23) around the torch engine; written from SGLang's own request and response
types, and sharing nothing with our client.

What SGLang does that a client can trip over is done here, too: ``ignore_eos`` switches stop tokens off, names of weights that
the model does not have are passed over, a budget that the context cannot hold is cut, a request keeps its adapter by name.
"""

from __future__ import annotations

import asyncio
import base64
import json
from itertools import groupby
from pathlib import Path

import numpy as np
from aiohttp import web
from safetensors.torch import load_file

from rlframe.checksum import bit_sum
from workers.engines.protocol import SamplingParams, WeightUpdate
from workers.engines.torch.engine import TorchEngine


class WireServer:
    """``own_checksums`` and ``own_ends``: as SGLang's own launcher starts it, with checksums by SHA-256 and the end tokens of
    the model; ``silent``: paths that are never answered.
    """

    def __init__(
        self,
        path: str,
        *,
        context_length: int,
        own_checksums: bool = False,
        own_ends: bool = False,
        silent: tuple[str, ...] = (),
    ) -> None:
        self.engine = TorchEngine(path, max_model_len=context_length)
        self.context_length, self.own_checksums, self.own_ends, self.silent = context_length, own_checksums, own_ends, silent
        self.labels = {0: "default"}
        self.adapters: dict[str, dict] = {}
        self.running: dict[str, asyncio.Task] = {}
        self.seen: list[tuple[str, dict]] = []
        app = web.Application(client_max_size=2**26)
        for path_, handler in {
            "/generate": self.generate,
            "/abort_request": self.abort_request,
            "/pause_generation": self.pause_generation,
            "/continue_generation": self.continue_generation,
            "/update_weights_from_disk": self.update_weights_from_disk,
            "/update_weight_version": self.update_weight_version,
            "/weights_checker": self.weights_checker,
            "/load_lora_adapter": self.load_lora_adapter,
            "/unload_lora_adapter": self.unload_lora_adapter,
        }.items():
            app.router.add_post(path_, self._logged(handler))
        for path_ in ("/model_info", "/server_info", "/flush_cache"):
            app.router.add_get(path_, self._info)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)

    async def start(self) -> str:
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    def hang_up(self) -> None:
        """Close all connections, as servers do with those that were idle for some seconds."""
        for handler in self.runner.server.connections:
            handler.transport.close()

    async def stop(self) -> None:
        """End as a killed process does: connections break, nothing is answered."""
        for task in self.running.values():
            task.cancel()
        await self.runner.cleanup()
        await self.engine.close()

    def _logged(self, handler):
        async def handle(request: web.Request) -> web.Response:
            body = await request.json()
            self.seen.append((request.path, body))
            if request.path in self.silent:
                await asyncio.Event().wait()
            try:
                return await handler(body)
            except ValueError as error:
                return web.json_response({"error": {"message": str(error)}}, status=400)

        return handle

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "tiny", "is_generation": True, "weight_version": self.label()})

    def label(self) -> str:
        return self.labels[self.engine.version]

    async def generate(self, body: dict) -> web.Response:
        wanted, prompt, adapter = body["sampling_params"], body["input_ids"], body.get("lora_path")
        async with self.engine._changed:
            await self.engine._changed.wait_for(lambda: not self.engine._paused)
        if adapter is not None and adapter not in self.adapters:
            raise ValueError(f"The following requested LoRA adapters are not loaded: {adapter}")
        stops = set() if wanted["ignore_eos"] else set(wanted["stop_token_ids"])
        if self.own_ends and not wanted["ignore_eos"]:
            stops.add(self.engine._model.module.config.eos_token_id)
        params = SamplingParams(
            max_new_tokens=min(wanted["max_new_tokens"], self.context_length - len(prompt)),
            temperature=wanted["temperature"],
            logprobs=body["top_logprobs_num"],
            stop_token_ids=tuple(stops),
            seed=wanted["sampling_seed"],
        )
        task = asyncio.create_task(self.engine.generate(np.array(prompt), params))
        self.running[body["rid"]] = task
        try:
            completion = await task
        finally:
            del self.running[body["rid"]]
        return web.json_response({"text": "", "output_ids": completion.ids.tolist(), "meta_info": self.meta(body, completion)})

    def meta(self, body: dict, completion) -> dict:
        n = len(completion.ids)
        spans, start = [], 0
        for version, rows in groupby(completion.versions.tolist()):
            end = start + len(list(rows))
            spans.append({"version": self.labels[version], "start": start, "end": end})
            start = end
        ends = {
            "length": {"length": n},
            "stop": {"matched": int(completion.ids[-1]) if n else 0},
            "abort": {"message": "Aborted"},
        }
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": completion.finish} | ends[completion.finish],
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": n,
            "weight_version": spans[-1]["version"] if spans else self.label(),
            "weight_versions": spans,
        }
        if body["return_logprob"]:
            pairs = zip(completion.logprobs.tolist(), completion.ids.tolist(), strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
            meta["input_token_logprobs"] = []
            meta |= heads(body, completion)
        return meta

    async def abort_request(self, body: dict) -> web.Response:
        for rid, task in self.running.items():
            if body.get("abort_all") or (body["rid"] and rid.startswith(body["rid"])):
                task.cancel()
        return web.Response()

    async def pause_generation(self, body: dict) -> web.Response:
        await self.engine.pause({"retract": "keep", "abort": "abort"}[body["mode"]])
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, body: dict) -> web.Response:
        await self.engine.resume()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weights_from_disk(self, body: dict) -> web.Response:
        if not body["flush_cache"]:
            raise ValueError("requests would continue with the key-value cache of other weights")
        (file,) = Path(body["model_path"]).glob("*.safetensors")
        known = {n: t.numpy() for n, t in load_file(file).items() if n in self.engine._base}
        await self._load(WeightUpdate(self._next(body["weight_version"]), "merged", known))
        return web.json_response({"success": True, "message": "Succeeded.", "num_paused_requests": 0})

    async def _load(self, update: WeightUpdate) -> None:
        """Only an idle or paused server loads; SGLang would wait for the requests that run."""
        if not self.engine._paused:
            raise ValueError("requests are running")
        await self.engine.load_weights(update)

    def _next(self, label: str) -> int:
        """The engine's number for the weights that are called ``label`` from now on."""
        number = max(self.labels) + 1
        self.labels[number] = label
        return number

    async def update_weight_version(self, body: dict) -> web.Response:
        self.engine.version = self._next(body["new_version"])
        return web.json_response({"success": True, "message": "", "new_version": body["new_version"]})

    async def weights_checker(self, body: dict) -> web.Response:
        assert body["action"] == "checksum"
        tensors = dict(self.engine._base)
        for name, factors in self.adapters.items():
            tensors |= {f"adapter.{name}.{key}": tensor for key, tensor in factors.items()}
        sums = {n: "0123456789abcdef" if self.own_checksums else f"bit-sum:{bit_sum(t):x}" for n, t in tensors.items()}
        rank = {"checksums": sums, "per_gpu_checksum": "", "parallelism_info": [{"role": "target", "tp_rank": 0, "tp_size": 1}]}
        return web.json_response({"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": ""})

    async def load_lora_adapter(self, body: dict) -> web.Response:
        folder = Path(body["lora_path"])
        factors = load_file(folder / "adapter_model.safetensors")
        config = json.loads((folder / "adapter_config.json").read_text())
        arrays = {name: tensor.numpy() for name, tensor in factors.items()}
        await self._load(WeightUpdate(self.engine.version, "adapter", arrays, adapter=config))
        self.adapters[body["lora_name"]] = factors
        return web.json_response({"success": True, "error_message": None, "loaded_adapters": dict.fromkeys(self.adapters, "")})

    async def unload_lora_adapter(self, body: dict) -> web.Response:
        del self.adapters[body["lora_name"]]
        return web.json_response({"success": True, "error_message": None, "loaded_adapters": dict.fromkeys(self.adapters, "")})


def heads(body: dict, completion) -> dict:
    """Top log-probabilities of the output: flat arrays in base64, or a list of (log-probability, id, text) per position."""
    if body["top_logprobs_num"] == 0:
        return {}
    if body.get("return_flat_raw_output_top_logprobs"):
        assert body["return_flat_raw_top_logprobs_b64"]
        return {
            "output_top_logprobs_val_flat_b64": base64.b64encode(completion.head_logprobs.astype("<f4").tobytes()).decode(),
            "output_top_logprobs_idx_flat_b64": base64.b64encode(completion.head_ids.astype("<i4").tobytes()).decode(),
            "output_top_logprobs_val_flat_b64_dtype": "float32",
            "output_top_logprobs_idx_flat_b64_dtype": "int32",
            "output_top_logprobs_shape": list(completion.head_ids.shape),
            "output_top_logprobs_null_prefix": 0,
        }
    rows = zip(completion.head_logprobs.tolist(), completion.head_ids.tolist(), strict=True)
    return {"output_top_logprobs": [[[lp, i, None] for lp, i in zip(*row, strict=True)] for row in rows]}
