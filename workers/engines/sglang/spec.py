"""SGLang, as the rest of rlframe knows it; the engine is `workers.engines.sglang.engine`."""

from __future__ import annotations

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
    refuse,
    refuse_random_weights,
)
from workers.rollout.settings import RolloutConfig
from workers.settings import Config

if TYPE_CHECKING:
    from workers.engines.protocol import Engine


class SGLangSpec(EngineSpec):
    """An SGLang server, in a child process or at an address."""

    title = "SGLang"
    package = "sglang"
    distributions = ("sglang",)
    install = "on GPUs `pip install 'rlframe[train,sglang]'`, for a CPU `make install-sglang`, an environment of its own"
    tensor_parallel = True
    settings = ("rollout.server_urls", "rollout.weights_dir")
    owned = OWNED | {
        "model_path": MODEL,
        "tokenizer_path": OWNED["tokenizer"],
        "json_model_override_args": AS_DESCRIBED,
        "random_seed": "seed decides",
        "context_length": "rollout.max_model_len decides",
        "max_running_requests": "rollout.max_concurrency decides",
        "tp_size": OWNED["tensor_parallel_size"],
        **dict.fromkeys(("pp_size", "dp_size"), OWNED["nnodes"]),
        **dict.fromkeys(("max_loras_per_batch", "max_loaded_loras", "lora_paths"), OWNED["enable_lora"]),
        **dict.fromkeys(("sampling_defaults", "preferred_sampling_params"), NO_DEFAULTS),
        "host": "the worker decides",
        "port": "the worker decides",
    }

    def make(self, config: Config, model_path: str, index: int) -> Engine:
        """Build the engine of one rollout worker; worker ``index`` has the address of that number, where there are any."""
        from workers.engines.sglang.engine import SGLangEngine

        rollout = config.rollout
        return SGLangEngine(
            model_path,
            url=rollout.server_urls[index] if rollout.server_urls else None,
            weights_dir=rollout.weights_dir,
            max_lora_rank=adapter_rank(config),
            **common_options(config, index),
        )

    def check(self, config: Config) -> None:
        """Refuse weights that are not the model's, adapters that change under requests, and addresses that do not fit."""
        rollout = config.rollout
        urls = rollout.server_urls
        refuse_random_weights(rollout)
        refuse(
            rollout.weight_sync == "adapter" and rollout.on_update == "keep",
            "rollout.on_update=keep would let requests continue under the adapter that they started with, since "
            "rollout.engine=sglang binds each request to one; set rollout.on_update=abort or rollout.weight_sync=merged.",
        )
        refuse(
            bool(urls) and len(urls) != rollout.workers,
            f"rollout.server_urls has {len(urls)} addresses and rollout.workers={rollout.workers}; each worker needs its own.",
        )
        refuse(
            len(set(urls)) < len(urls) or any(not url.startswith(("http://", "https://")) for url in urls),
            f"rollout.server_urls={urls} must be different addresses such as http://host:30000.",
        )
        refuse(
            bool(urls) and bool(rollout.engine_args),
            "rollout.engine_args cannot change servers that run already (rollout.server_urls); give them to the servers "
            "instead.",
        )

    def needed(self, rollout: RolloutConfig) -> str | None:
        """Nothing here where servers run elsewhere."""
        return None if rollout.server_urls else self.package

    def arguments(self) -> dict[str, str] | None:
        """Those of the SGLang that is installed here."""
        return declared("sglang", "srt/server_args.py", ("ServerArgs",))

    def reserved_cache(self, rollout: RolloutConfig) -> float | None:
        """On a CPU 1 GiB (`workers.engines.sglang.process.CPU_CACHE_BYTES`)."""
        return None if rollout.gpus else 2.0**30


ENGINE = SGLangSpec()
