"""The torch reference sampler, as the rest of rlframe knows it; the engine is `workers.engines.torch.engine`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workers.engines.spec import EngineSpec, threads
from workers.settings import Config

if TYPE_CHECKING:
    from workers.engines.adapters import AdapterEngine
    from workers.engines.protocol import Engine


class TorchSpec(EngineSpec):
    """transformers, in the worker's own process."""

    title = "the torch engine"
    package = "torch"
    distributions = ("torch",)
    install = "run `make install`"
    serves_adapters = True
    takes_arguments = False

    def make(self, config: Config, model_path: str, index: int) -> Engine:
        """Build the engine of one rollout worker; requests carry their seeds, so ``index`` changes nothing."""
        from workers.engines.torch.engine import TorchEngine

        return TorchEngine(model_path, **_options(config))

    def make_adapter_engine(self, config: Config, model_path: str, index: int) -> AdapterEngine:
        """Build the engine that serves the adapters of the server's models."""
        from workers.engines.torch.adapters import TorchAdapterEngine

        return TorchAdapterEngine(model_path, max_loras=config.server.max_loras, **_options(config))


def _options(config: Config) -> dict[str, Any]:
    import torch

    torch.set_num_threads(threads(config.rollout))
    return {
        "max_model_len": config.rollout.max_model_len,
        "dtype": config.rollout.dtype,
        "device": "cuda" if config.rollout.gpus else "cpu",
        "trust_remote_code": config.model.trust_remote_code,
    }


ENGINE = TorchSpec()
