"""The process that serves SGLang for rlframe: SGLang's own HTTP server, started with its own flags, and hooks.

    python -m workers.engines.sglang.server --model-path FOLDER --port 30000 ...

SGLang starts its schedulers by spawning: each child runs the top level of this module again before anything else, so the hooks
(and, on a CPU, the stand-in for the GPU kernels) are in place in every process. They go through SGLang's hook registry:

- the checksum of a tensor is the sum of its bit patterns, which does not depend on how SGLang fuses and pads parameters, and
  adapters have checksums, too;
- no token of the model's own ends a request, so that `stop_token_ids` alone do (SGLang's ``ignore_eos`` ignores those, too);
- the processes end with their owner, if they have one (`workers.engines.owner`).

The client is `workers.engines.sglang.engine`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from rlframe.checksum import bit_sum
from workers.engines.owner import end_with_owner
from workers.engines.sglang import cpu
from workers.engines.sglang.wire import ADAPTER_PREFIX, CHECKSUM_PREFIX

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    cpu.install()
end_with_owner()

from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: E402  # after the stand-in


def hash_tensor(tensor: torch.Tensor) -> str:
    """The checksum of one tensor."""
    return f"{CHECKSUM_PREFIX}{bit_sum(tensor):x}"


def add_adapters(result: dict[str, Any] | None, runner: Any, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
    """Add the tensors of loaded adapters, as SGLang keeps them in host memory, to what a model runner says of its weights."""
    manager = getattr(runner, "lora_manager", None)
    if result is not None and manager is not None:
        for adapter_id, adapter in manager.loras.items():
            weights = [layer.weights for layer in adapter.layers] + [adapter.embedding_layers]
            result["checksums"] |= {
                f"{ADAPTER_PREFIX}{adapter_id}.{name}": hash_tensor(tensor) for part in weights for name, tensor in part.items()
            }
    return result


def register_hooks() -> None:
    """Put the hooks where SGLang applies them when it loads its plugins."""
    for target, hook, kind in (
        ("sglang.srt.utils.weight_checker._hash_tensor", hash_tensor, HookType.REPLACE),
        ("sglang.srt.model_executor.model_runner.ModelRunner.check_weights", add_adapters, HookType.AFTER),
        ("sglang.srt.configs.model_config.ModelConfig._get_hf_eos_token_id", lambda self: set(), HookType.REPLACE),
    ):
        HookRegistry.register(target, hook, kind)


register_hooks()


def main(arguments: list[str]) -> None:
    """Serve until killed; ``arguments`` are the flags of ``sglang.launch_server``."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
