"""The process that serves SGLang for rlframe: SGLang's own HTTP server, started with its own flags, and three hooks.

    python -m workers.rollout.sglang_server --model-path FOLDER --port 30000 ...

SGLang starts its schedulers by spawning: each child runs the top level of this module again before anything else, so the hooks
(and, on a CPU, the stand-in for the GPU kernels) are in place in every process. They go through SGLang's hook registry:

- the checksum of a tensor is the sum of its bit patterns, which does not depend on how SGLang fuses and pads parameters;
- no token of the model's own ends a request, so that `stop_token_ids` alone do (SGLang's ``ignore_eos`` ignores those, too);
- the processes end with their owner, if they have one (`workers.rollout.owner`).

The client is `workers.rollout.sglang`.
"""

from __future__ import annotations

import os
import sys

from workers.rollout import sglang_cpu
from workers.rollout.owner import end_with_owner
from workers.rollout.sglang_wire import CHECKSUM_PREFIX

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    sglang_cpu.install()
end_with_owner()


def register_hooks() -> None:
    """Put the hooks where SGLang applies them when it loads its plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from rlframe.checksum import bit_sum

    def hash_tensor(tensor: object) -> str:
        return f"{CHECKSUM_PREFIX}{bit_sum(tensor):x}"  # type: ignore[arg-type]  # always a tensor

    HookRegistry.register("sglang.srt.utils.weight_checker._hash_tensor", hash_tensor, HookType.REPLACE)
    HookRegistry.register(
        "sglang.srt.configs.model_config.ModelConfig._get_hf_eos_token_id", lambda self: set(), HookType.REPLACE
    )


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
